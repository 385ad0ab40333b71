"""Where bytes go: integers in, integers out. No tensor, no device, no torch.

Each order maps the coordinates of one matrix to positions in its storage and back, and says what the
positions between and after them hold. Kernels, the reference, allocation, the audit and export all read the
same maps.

    RowMajor      rows of a matrix, padded at the end, or between the parts of a fused weight
    Nibbles       two E2M1 codes a byte, low nibble first
    Swizzle128x4  scale bytes in tiles of 128 rows by 4 columns, as block-scaled matrix kernels read them
    MNMajor       one float32 scale a row and group, column by column, columns 16-byte aligned
    UE8M0Words    four scale exponents an int32, words column by column, columns 16-byte aligned

Spec      docs/formats/layouts.md
Elsewhere memory is made in olq.alloc; tensors are moved between orders in olq.numerics.packing and .swizzle.
"""

from olq.layout.columns import MNMajor, UE8M0Words, aligned_rows
from olq.layout.order import Cell, Fill, Order
from olq.layout.rows import Nibbles, RowMajor
from olq.layout.strides import contiguous_strides, extent_of, overlaps
from olq.layout.swizzle import Swizzle128x4
from olq.layout.tiling import check_tiling

__all__ = [
    "Cell",
    "Fill",
    "MNMajor",
    "Nibbles",
    "Order",
    "RowMajor",
    "Swizzle128x4",
    "UE8M0Words",
    "aligned_rows",
    "check_tiling",
    "contiguous_strides",
    "extent_of",
    "overlaps",
]
