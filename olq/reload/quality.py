"""How far stored weights are from what arrived: SQNR and worst block, taken while the source is still at hand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from olq.methods.base import QuantMethod, Target, WeightPlan

#: Elements that are decoded and compared at once.
_CHUNK = 1 << 17


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


@dataclass
class ErrorMeter:
    """Sums of squares over a weight, and its block with the lowest ratio of signal to noise.

    Blocks are those that share a scale, cut where an arrival cuts them. Sums are float64. A saturated value counts as
    the finite value that it was taken for. Scratch: 5 MiB, or 40 bytes an element of a block that is larger than
    131,072 elements and not a whole part.
    """

    signal: float = 0.0
    noise: float = 0.0
    worst_db: float = math.inf
    worst_block: tuple[int, ...] = ()

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise of everything added so far, in decibels."""
        return decibel(self.signal, self.noise)

    def add(
        self,
        method: QuantMethod,
        plan: WeightPlan,
        tensors: Mapping[str, Tensor],
        target: Target,
        source: Tensor,
    ) -> None:
        """Compare whole units with their source.

        Args:
            method: has just stored `target`.
            plan: the weight's plan.
            tensors: its kernel tensors.
            target: which units.
            source: what arrived for them, [*lead, n, k].
        """
        if not source.numel():
            return
        # A block that is the whole part is summed up over bands of rows; all others are whole within a band.
        block = plan.block[0] or len(target.rows), plan.block[1] or len(target.columns)
        whole_part = not plan.block[0]
        lead = math.prod(source.shape[:-2])
        step = max(_CHUNK // (lead * len(target.columns)), 1)
        step = step if whole_part else max(step // block[0], 1) * block[0]
        sums: tuple[Tensor, Tensor] | None = None
        for start in range(0, len(target.rows), step):
            band = target.rows[start : start + step]
            pieces = self._band(
                method, plan, tensors, target, band, source[..., start : start + len(band), :]
            )
            down = len(band) if whole_part else block[0]
            found = _block_sums(pieces[0], (down, block[1])), _block_sums(pieces[1], (down, block[1]))
            if not whole_part:
                self._take(*found, plan, target, band, block)
            else:
                sums = found if sums is None else (sums[0] + found[0], sums[1] + found[1])
        if sums is not None:
            self._take(*sums, plan, target, target.rows, block)

    def _band(
        self,
        method: QuantMethod,
        plan: WeightPlan,
        tensors: Mapping[str, Tensor],
        target: Target,
        band: range,
        source: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Squares of the values and of the errors of some rows, float32."""
        keeps = getattr(method.params, "source_precision", "parameter") == "keep"
        dtype = source.dtype if keeps else plan.dtype
        most = torch.finfo(dtype).max
        exact = source.to(tensors[""].device, dtype).nan_to_num(0.0, most, -most).float()
        stored = torch.empty_like(exact, memory_format=torch.contiguous_format)
        method.dequantize_(stored, tensors, plan, Target(target.lead, target.part, band, target.columns))
        return exact.double().square_(), stored.sub_(exact).double().square_()

    def _take(
        self,
        signal: Tensor,
        noise: Tensor,
        plan: WeightPlan,
        target: Target,
        band: range,
        block: tuple[int, int],
    ) -> None:
        """Add sums over blocks, [*lead, down, across]."""
        self.signal += float(signal.sum())
        self.noise += float(noise.sum())
        ratio = torch.where(noise > 0, signal / noise, math.inf)
        lowest = int(ratio.argmin())
        value = float(ratio.flatten()[lowest])
        db = decibel(value, 1.0) if value < math.inf else math.inf
        if not self.worst_block or db < self.worst_db:
            *at, down, across = _unravel(lowest, ratio.shape)
            experts = [
                range(s.start or 0, s.stop, s.step or 1)[i] for s, i in zip(target.lead, at, strict=True)
            ]
            row = plan.geometry.starts[target.part] + band[down * block[0]]
            self.worst_db = db
            self.worst_block = (*experts, row, target.columns[across * block[1]])


def _unravel(index: int, shape: torch.Size) -> list[int]:
    """Coordinates of a flat index."""
    at: list[int] = []
    for n in reversed(shape):
        index, here = divmod(index, n)
        at.append(here)
    return at[::-1]


def _block_sums(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Sums over blocks of the last two dimensions; the last row and column of blocks may be part-filled."""
    rows, columns = values.shape[-2:]
    pad = -columns % block[1], -rows % block[0]
    values = functional.pad(values, (0, pad[0], 0, pad[1]))
    down, across = (rows + pad[1]) // block[0], (columns + pad[0]) // block[1]
    return values.reshape(*values.shape[:-2], down, block[0], across, block[1]).sum((-3, -1))
