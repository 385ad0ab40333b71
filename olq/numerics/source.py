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


def rounds_through(tensor: Tensor, through: torch.dtype | None) -> torch.dtype | None:
    """The narrow dtype that elements have to be rounded to, or None if they need no rounding."""
    return through if through in _NARROW and through != tensor.dtype else None


def source_bytes(tensor: Tensor, through: torch.dtype | None) -> int:
    """Bytes of scratch an element that reading takes."""
    return 4 + (2 if rounds_through(tensor, through) else 0)


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
        x = self.scratch.take("x", part.shape, torch.float32)
        x.copy_(part)
        if self._through is not None:
            rounded = self.scratch.take("through", part.shape, self._through)
            x.copy_(rounded.copy_(x))
        if self._largest is not None:
            torch.nan_to_num(x, nan=0.0, posinf=self._largest, neginf=-self._largest, out=x)
        return x

    def put_largest(self, part: Tensor, split: tuple[int, ...], whole: bool, out: Tensor) -> None:
        """Write the largest |x| of each unit of a piece, as bits if `bits_will_do`: NaN if the unit holds one, else
        infinity if it holds one. Zeros may give -0.0. A part of a unit raises what is already there.

        Args:
            part: the piece's elements, a view of the weight.
            split: their shape when cut into units, `Box.split_shape`.
            whole: False for a part of a unit.
            out: [*l, down, across], int16 if `bits_will_do`, else float32; any strides.
        """
        if self.bits_will_do:
            magnitude = self.scratch.take("magnitude", part.shape, part.dtype)
            if part.device == magnitude.device:
                torch.abs(part, out=magnitude)
            else:
                magnitude.copy_(part).abs_()
            bits = magnitude.view(
                torch.int16
            )  # they order magnitudes, NaN last, and integers are compared faster
            if whole:
                _over_units(bits.view(split), torch.amax, out)
            else:
                torch.maximum(out, _over_units(bits.view(split), torch.amax), out=out)
            return
        x = self.read(part).view(split)
        most, least = _over_units(x, torch.amax), _over_units(x, torch.amin).neg_()
        torch.maximum(most, least, out=out) if whole else out.copy_(torch.maximum(out, most.maximum(least)))

    def magnitudes(self, largest: Tensor) -> Tensor:
        """What `put_largest` wrote, as float32."""
        return largest.view(self.tensor.dtype).float() if self.bits_will_do else largest

    def pieces(self, box: Box) -> "Pieces":
        """The pieces of one box of whole units."""
        return Pieces(self, box)


class Pieces:
    """The pieces of one box, in coordinates of the box; read once for the magnitudes and once for the elements.

    Args:
        source: whose box it is.
        box: of whole units.
    """

    def __init__(self, source: Source, box: Box) -> None:
        self._source, part = source, source.tensor[box.index]
        # Views and indices once for both sweeps: beside a piece's few operators, Python's own work shows.
        walked = list(pieces(part.shape, box.unit, source.scratch.elements))
        if len(walked) == 1:
            part = part.to(source.scratch.device)  # across a bus once
        self._pieces = [(p.index, p.unit_index, part[p.index], p.split_shape) for p in walked]
        self._whole = walked[0].whole
        self._amax_shape = (*part.shape[:-2], *box.units)

    def magnitudes(self) -> Tensor:
        """Largest |x| of each unit, [*l, down, across], float32; see `Source.put_largest`."""
        source = self._source
        dtype = torch.int16 if source.bits_will_do else torch.float32
        amax = torch.empty(self._amax_shape, dtype=dtype, device=source.scratch.device)
        if not self._whole:
            amax.zero_()
        for _, units, part, split in self._pieces:
            source.put_largest(part, split, self._whole, amax[units])
        return source.magnitudes(amax)

    def __iter__(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], Tensor, Tensor]]:
        """For each piece: the indices of its elements and of its units in the box, the elements, and the same elements
        in `split_shape`. The taker may overwrite them."""
        for index, units, part, split in self._pieces:
            x = self._source.read(part)
            yield index, units, x, x.view(split)


def _over_units(x: Tensor, reduce: Callable[..., Tensor], out: Tensor | None = None) -> Tensor:
    """Reduce [*l, down, unit rows, across, unit columns], contiguous, to [*l, down, across]."""
    if (
        x.shape[-2] == 1
    ):  # units as wide as the piece are dense: one reduction, vectorised even for short rows
        return reduce(x.flatten(-3), -1, keepdim=True, out=out)
    return reduce(x.squeeze(-3), -1, out=out) if x.shape[-3] == 1 else reduce(x, (-3, -1), out=out)
