"""One box of a weight in float32: rounded as a copy into the parameter would round it; finite on request.

Steps   1. float64 is rounded to float32 (float32, bfloat16 and float16 are exact in it).
        2. `through`, if it is narrower than float32, rounds once more; beyond its range that gives an
           infinity.
        3. saturate: NaN becomes 0, an infinity becomes the largest finite value of `through`, or of the
           source.
"""

import torch
from torch import Tensor

from olq.formats import FLOAT32_MAX
from olq.numerics.chunks import Box, Scratch

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_POOLED = 16
_NARROW = (torch.bfloat16, torch.float16)


def rounds_through(tensor: Tensor, through: torch.dtype | None) -> torch.dtype | None:
    """The narrow dtype that elements have to be rounded to, or None if they need no rounding."""
    return through if through in _NARROW and through != tensor.dtype else None


def source_bytes(tensor: Tensor, through: torch.dtype | None) -> int:
    """Bytes of scratch an element that reading takes."""
    return 4 + (2 if rounds_through(tensor, through) else 0)


class Source:
    """A weight to be read box by box.

    Args:
        tensor: [*lead, n, k], a floating type of `SOURCE_DTYPES`, any strides, any device.
        through: the parameter's dtype, or None to keep the source's own values.
        saturate: see the module.
        scratch: of the call; its device may differ from the tensor's.
    """

    def __init__(self, tensor: Tensor, through: torch.dtype | None, saturate: bool, scratch: Scratch) -> None:
        self.tensor, self._scratch = tensor, scratch
        self._through = rounds_through(tensor, through)
        largest = torch.finfo(through or tensor.dtype).max
        self._largest = min(largest, FLOAT32_MAX) if saturate else None

    def read(self, box: Box) -> Tensor:
        """[*l, rows, columns] contiguous float32 in scratch, valid until the next read."""
        part = self.tensor[box.index]
        x = self._scratch.take("x", part.shape, torch.float32)
        x.copy_(part)
        if self._through is not None:
            rounded = self._scratch.take("through", part.shape, self._through)
            x.copy_(rounded.copy_(x))
        if self._largest is not None:
            torch.nan_to_num(x, nan=0.0, posinf=self._largest, neginf=-self._largest, out=x)
        return x


def largest_magnitude(x: Tensor) -> Tensor:
    """Largest |x| of each unit, [*l, down, across], float32; no buffer for |x|.

    `x` is contiguous [*l, down, unit rows, across, unit columns], float32. NaN if the unit holds one, else infinity
    if it holds one. A unit of zeros may give -0.0.
    """
    if x.shape[-2] == 1:  # units as wide as the box are dense: one reduction, vectorised even for short rows
        x = x.flatten(-3)
        return torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    most, least = x.amax(-1), x.amin(-1)
    if x.shape[-3] > 1:
        most, least = most.amax(-2, keepdim=True), least.amin(-2, keepdim=True)
    return torch.maximum(most, least.neg_()).squeeze(-2)


def block_magnitude(x: Tensor, magnitude: Tensor) -> Tensor:
    """Largest |x| of each block of 1 x columns, as `largest_magnitude`, for who needs |x| as well.

    `x` and `magnitude` are contiguous [*l, down, 1, across, columns], float32; |x| goes to `magnitude`.
    """
    torch.abs(x, out=magnitude)
    if x.shape[-1] == _POOLED and x.device.type == "cpu":
        # The same maxima, NaN included, in a third of the time: reductions of 16 are too short for vectors.
        rows = magnitude.flatten(0, -4).flatten(-3)
        return torch.nn.functional.max_pool1d(rows, _POOLED).view(*x.shape[:-3], x.shape[-2])
    return magnitude.amax(-1).squeeze(-2)
