"""One piece of a weight in float32: rounded as a copy into the parameter would round it; finite on request.

Steps   1. float64 is rounded to float32 (float32, bfloat16 and float16 are exact in it).
        2. `through`, if it is narrower than float32, rounds once more; beyond its range that gives an
           infinity.
        3. saturate: NaN becomes 0, an infinity becomes the largest finite value of `through`, or of the
           source.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from olq.formats import FLOAT32_MAX
from olq.numerics.chunks import Box, Scratch, pieces

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)

# Torch uses no vectors for a contiguous run shorter than four of them, 256 bits each; widening 32 numbers to int32
# and comparing those takes less than half as long.
_VECTORS_OF_INT32, _VECTORS_OF_INT16 = 32, 64


def rounds_through(tensor: Tensor, through: torch.dtype | None) -> torch.dtype | None:
    """The narrow dtype that elements have to be rounded to, or None if they need no rounding."""
    return through if through in _NARROW and through != tensor.dtype else None


def source_bytes(tensor: Tensor, through: torch.dtype | None) -> int:
    """Bytes of scratch an element that reading takes: float32, and 16 bits for magnitudes or for rounding."""
    return 4 + (2 if tensor.dtype in _NARROW or rounds_through(tensor, through) else 0)


class Source:
    """A weight to be read piece by piece.

    Args:
        tensor: [*lead, n, k], a floating type of `SOURCE_DTYPES`, any strides, any device.
        through: the parameter's dtype, or None to keep the source's own values.
        saturate: see the module.
        scratch: of the call; its device may differ from the tensor's.

    Attributes:
        bits_will_do: the tensor's own 16 bits order its magnitudes; nothing has to be converted to compare them.
    """

    def __init__(self, tensor: Tensor, through: torch.dtype | None, saturate: bool, scratch: Scratch) -> None:
        self.tensor, self.scratch = tensor, scratch
        self._through = rounds_through(tensor, through)
        largest = torch.finfo(through or tensor.dtype).max
        self._largest = min(largest, FLOAT32_MAX) if saturate else None
        self.bits_will_do = tensor.dtype in _NARROW and self._through is None and not saturate

    def read(self, part: Tensor) -> Tensor:
        """[*l, rows, columns] contiguous float32 in scratch, valid until the next read. `part` is a view of the
        weight."""
        x = self.kept(part)
        x.copy_(part)
        if self._through is not None:
            rounded = self.scratch.take("through", part.shape, self._through)
            x.copy_(rounded.copy_(x))
        if self._largest is not None:
            torch.nan_to_num(x, nan=0.0, posinf=self._largest, neginf=-self._largest, out=x)
        return x

    def kept(self, part: Tensor) -> Tensor:
        """What the last `read` gave, if that was of `part`."""
        return self.scratch.take("x", part.shape, torch.float32)

    def largest(self, part: Tensor, split: tuple[int, ...]) -> Tensor:
        """Largest |x| of each unit of a piece, [*l, down, across], as bits if `bits_will_do`: NaN if the unit holds
        one, else infinity if it holds one. Zeros may give -0.0. Unless `bits_will_do` it reads, and `kept` has that.

        Args:
            part: the piece's elements, a view of the weight.
            split: their shape when cut into units, `Box.split_shape`.
        """
        if not self.bits_will_do:
            x = self.read(part).view(split)
            return torch.maximum(_over_units(x, torch.amax), _over_units(x, torch.amin).neg_())
        magnitude = self.scratch.take("magnitude", part.shape, part.dtype)
        if part.device == magnitude.device:
            torch.abs(part, out=magnitude)
        else:
            magnitude.copy_(part).abs_()
        # Bits order magnitudes, NaN last, and integers are compared faster.
        bits = magnitude.view(torch.int16)
        if _VECTORS_OF_INT32 <= split[-1] < _VECTORS_OF_INT16:
            bits = self.scratch.take("x", part.shape, torch.float32).view(torch.int32).copy_(bits)
        return _over_units(bits.view(split), torch.amax)

    def magnitudes(self, largest: Tensor) -> Tensor:
        """What `largest` returned, as float32."""
        return largest.to(torch.int16).view(self.tensor.dtype).float() if self.bits_will_do else largest

    def pieces(self, box: Box) -> "Pieces":
        """The pieces of one box of whole units."""
        return Pieces(self, box)


class Pieces:
    """A box that fits the buffers as one piece, or the pieces of one unit that does not; read once for the magnitudes
    and once for the elements, or once for both.

    Args:
        source: whose box it is.
        box: of whole units, at most `Scratch.elements` elements or one unit.
    """

    def __init__(self, source: Source, box: Box) -> None:
        self._source, part = source, source.tensor[box.index]
        self._fits = part.numel() <= source.scratch.elements
        if self._fits:
            part = part.to(source.scratch.device)  # across a bus once
            everything = tuple(slice(0, extent) for extent in part.shape)
            self._pieces = [(everything, part, box.split_shape)]
        else:
            walk = pieces(part.shape, box.unit, source.scratch.elements)
            self._pieces = [(p.index, part[p.index], p.split_shape) for p in walk]
        self._is_read = False

    def magnitudes(self) -> Tensor:
        """Largest |x| of each unit, [*l, down, across], float32; see `Source.largest`."""
        source = self._source
        (_, part, split), *rest = self._pieces
        largest = source.largest(part, split)
        for _, part, split in rest:  # of the same unit
            largest = torch.maximum(largest, source.largest(part, split))
        self._is_read = self._fits and not source.bits_will_do
        return source.magnitudes(largest)

    def __iter__(self) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor]]:
        """For each piece: the index of its elements in the box, the elements, and the same elements in `split_shape`.
        The taker may overwrite them, and has called `magnitudes` before or not at all."""
        for index, part, split in self._pieces:
            x = self._source.kept(part) if self._is_read else self._source.read(part)
            self._is_read = False
            yield index, x, x.view(split)


def _over_units(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce [*l, down, unit rows, across, unit columns], contiguous, to [*l, down, across]."""
    if x.shape[-2] == 1:
        # Units as wide as the piece are dense: one reduction, vectorised even for short rows.
        return reduce(x.flatten(-3), -1, keepdim=True)
    return reduce(x.squeeze(-3), -1) if x.shape[-3] == 1 else reduce(x, (-3, -1))
