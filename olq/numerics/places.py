"""Where a block's scale byte goes in the scale tensor of a whole weight.

Block (i, j) of the tensor at hand, which may be a part of a fused weight, has its byte at row `row + i *
row_step`, column `column + j`. Only these bytes are read or written, padding never.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from olq.numerics.swizzle import flat_index


@dataclass(frozen=True, slots=True)
class Places:
    """Scale bytes of one tensor inside the whole weight's.

    Args:
        scale: uint8, [*lead, R, C] row-major ("linear"), any strides; or [*lead, R', C'] bytes in 128x4 order
            ("swizzled_128x4"), whose last two dimensions are dense.
        layout: one of the two names.
        row: row of block row 0.
        row_step: rows from one block row to the next, at least 1.
        column: scale column of block column 0.
    """

    scale: Tensor
    layout: str
    row: int
    row_step: int
    column: int

    def write(self, index: tuple[slice, ...], bytes_: Tensor) -> None:
        """Put [*l, down, across] bytes, as any integer type, at the units `index` = (*lead, block rows, columns)."""
        if self.layout == "linear":
            self.scale[self._linear(index)] = bytes_
        else:
            flat, positions = self._swizzled(index)
            flat[..., positions] = bytes_.to(torch.uint8)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """The [*l, down, across] bytes of the units `index`."""
        if self.layout == "linear":
            return self.scale[self._linear(index)]
        flat, positions = self._swizzled(index)
        return flat[..., positions]

    def _linear(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        *lead, down, across = index
        first, last = self.row + down.start * self.row_step, self.row + (down.stop - 1) * self.row_step
        rows = slice(first, last + 1, self.row_step)
        return (*lead, rows, slice(self.column + across.start, self.column + across.stop))

    def _swizzled(self, index: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        *lead, down, across = index
        device, width = self.scale.device, self.scale.shape[-1]
        rows = torch.arange(down.start, down.stop, device=device) * self.row_step + self.row
        columns = torch.arange(across.start, across.stop, device=device) + self.column
        part = self.scale[(*lead,)] if lead else self.scale
        return part.view(*part.shape[:-2], -1), flat_index(rows[:, None], columns, width)
