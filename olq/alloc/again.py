"""Memory like what `allocate` made before, for producers that write every byte of it, padding included.

A spec costs its checks and `allocate` writes padding by launches of its own; more than some kernels run. A `Form` is
taken from a tensor that `allocate` made, and makes its like with one call of the device's allocator.
"""

import torch
from torch import Tensor

from olq.alloc import memory


class Form:
    """Shape, strides, dtype and storage of a tensor.

    Args:
        made: by `allocate`; its values are not read.
    """

    __slots__ = ("_dtype", "_extent", "_gaps", "_shape", "_stride")

    def __init__(self, made: Tensor) -> None:
        self._shape, self._stride, self._dtype = made.shape, made.stride(), made.dtype
        self._extent = made.untyped_storage().nbytes() // made.element_size() - made.storage_offset()
        reach = 1 + sum((n - 1) * s for n, s in zip(self._shape, self._stride, strict=True))
        self._gaps = not made.numel() or self._extent != reach

    def make(self, device: torch.device) -> Tensor:
        """A tensor like `made`, uninitialised, whose caller writes every byte; aligned as the device's allocator does.

        Without grad, owner of its storage; an inference tensor under `torch.inference_mode`.
        """
        if not self._gaps:
            return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=device)
        flat = torch.empty(self._extent, dtype=self._dtype, device=device)
        tensor = torch.empty(0, dtype=self._dtype, device=device)
        return tensor.set_(flat.untyped_storage(), 0, self._shape, self._stride)


def is_audited() -> bool:
    """Whether `allocate` has to make what is made now, because an audit wants to see it."""
    return memory.on_allocate is not None
