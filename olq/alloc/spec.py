"""What a kernel-owned tensor has to be, before any memory is made.

Rule for padding: an *order* (olq.layout) that the spec names owns its padding, and `allocate` writes it. A
spec without an order has no padding that the allocator knows of: each byte of its storage is the producer's,
and the text in `padding` says what the producer writes there.
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from olq.errors import LayoutError
from olq.layout import Order, contiguous_strides, extent_of, overlaps

# float8 and float4 types lack half their operators and change under `.half()`; codes, E8M0 bytes, E4M3 scale
# bytes and packed codes are uint8 here, and get a typed view where a kernel reads them.
DTYPES = (torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and place of one kernel-owned tensor.

    Args:
        shape: sizes, leading dimensions first.
        dtype: uint8 for codes, scale bytes and packed codes; int32 for packed words; float32, bfloat16,
            float16.
        strides: in elements; None is contiguous, or what `order` says.
        alignment: bytes that the address is a multiple of; a power of two, at least the element's size.
        layout: name of the order of the bytes, kept with them; `order.tag` if there is an order.
        padding: what the bytes outside the logical data hold and who writes them, in words.
        order: how one matrix, the last two dimensions, is stored. Leading dimensions repeat its storage.

    Raises:
        LayoutError: a dtype that kernel tensors don't have, strides under which elements share a place, an
            alignment that is no power of two, a shape that is not the order's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    alignment: int = 16
    layout: str = "row_major"
    padding: str = ""
    order: Order | None = None

    def __post_init__(self) -> None:
        self._set("shape", tuple(self.shape))
        if self.order is not None:
            self._adopt(self.order)
        self._set("strides", contiguous_strides(self.shape) if self.strides is None else tuple(self.strides))
        self._check()

    @property
    def extent(self) -> int:
        """Elements of the storage, padding and gaps included."""
        if self.order is None:
            return extent_of(self.shape, self.stride)
        units = self.order.extent * prod(self.shape[:-2])
        return units * (self.order.unit_bits or self.bits) // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, padding and gaps included."""
        return self.extent * self.bits // 8

    @property
    def bits(self) -> int:
        """Bits of one element of the tensor."""
        return self.dtype.itemsize * 8

    @property
    def stride(self) -> tuple[int, ...]:
        """`strides`, never None."""
        return self.strides or ()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _adopt(self, order: Order) -> None:
        """Take shape, strides, tag and padding from the order, or check that they agree."""
        tail = order.shape
        batch = order.extent * (order.unit_bits or self.bits) // self.bits
        lead = self.shape[:-2]
        strides = (*(step * batch for step in contiguous_strides(lead)), *order.strides)
        if self.shape[-2:] != tail or (self.strides is not None and tuple(self.strides) != strides):
            raise LayoutError(
                "A spec does not agree with its order.",
                where=f"TensorSpec in {order.tag} order",
                found=f"shape {list(self.shape)}, strides {self.strides and list(self.strides)}",
                need=f"a shape that ends in {list(tail)}, strides {list(strides)} or None",
                remedy="make it with TensorSpec.of(order, dtype, lead)",
            )
        if self.layout not in ("row_major", order.tag):
            raise LayoutError(
                "A spec has one tag and its order another.",
                where="TensorSpec",
                found=f"layout={self.layout!r}, order.tag={order.tag!r}",
                need="equal names",
                remedy="leave `layout` out where an order is given",
            )
        self._set("strides", strides)
        self._set("layout", order.tag)
        self._set("padding", self.padding or order.padding_text)

    def _check(self) -> None:
        found = None
        if self.dtype not in DTYPES:
            found = f"dtype {self.dtype}"
        elif (
            min(self.shape, default=0) < 0
            or len(self.stride) != len(self.shape)
            or min(self.stride, default=0) < 0
        ):
            found = f"shape {list(self.shape)}, strides {list(self.stride)}"
        elif overlaps(self.shape, self.stride):
            found = f"strides {list(self.stride)} for shape {list(self.shape)}: elements share a place"
        elif self.alignment < self.dtype.itemsize or self.alignment & (self.alignment - 1):
            found = f"alignment {self.alignment}"
        elif self.order is not None and self.order.element_bits not in (None, self.bits):
            found = f"dtype {self.dtype} in {self.order.tag} order"
        if found:
            raise LayoutError(
                "No kernel-owned tensor can be made from this spec.",
                where=f"TensorSpec, layout {self.layout!r}",
                found=found,
                need="uint8 for codes and scale bytes, int32, float32, bfloat16 or float16; no negative size "
                "or stride, elements apart from each other; alignment 2**n bytes, an element or more",
                remedy="store codes as uint8 and view them as float8 where a kernel reads them",
            )

    @classmethod
    def of(
        cls,
        order: Order,
        dtype: torch.dtype = torch.uint8,
        lead: tuple[int, ...] = (),
        *,
        alignment: int = 16,
    ) -> "TensorSpec":
        """The spec of a tensor in some order: shape, strides, tag and padding are the order's.

        Args:
            order: how one matrix is stored.
            dtype: the tensor's dtype.
            lead: leading dimensions, each a repetition of one matrix's storage.
            alignment: bytes.
        """
        return cls((*lead, *order.shape), dtype, alignment=alignment, layout=order.tag, order=order)

    def with_padding(self, text: str) -> "TensorSpec":
        """The same spec, with other words about its padding."""
        return replace(self, padding=text)
