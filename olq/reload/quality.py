"""How far stored weights are from what arrived: SQNR and worst block, taken while the source is still at hand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from olq.methods.base import QuantMethod, Target, WeightPlan

#: Elements that are decoded and compared at once.
_CHUNK = 1 << 18


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


@dataclass
class ErrorMeter:
    """Sums of squares over a weight, and its block with the lowest ratio of signal to noise.

    Blocks are those that share a scale, cut where an arrival or a chunk of 262,144 elements cuts
    them. Sums are float64.
    """

    signal: float = 0.0
    noise: float = 0.0
    worst_db: float = math.inf
    worst_block: tuple[int, int] = (0, 0)

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
        block = plan.block[0] or len(target.rows), plan.block[1] or len(target.columns)
        rows_at_once = max(_CHUNK // max(len(target.columns), 1) // block[0] * block[0], block[0])
        for start in range(0, len(target.rows), rows_at_once):
            rows = target.rows[start : start + rows_at_once]
            some = Target(target.lead, target.part, rows, target.columns)
            exact = source[..., start : start + len(rows), :].to(tensors[""].device, plan.dtype).float()
            stored = torch.empty_like(exact, memory_format=torch.contiguous_format)
            method.dequantize_(stored, tensors, plan, some)
            noise = (stored - exact).square_()
            first = plan.geometry.starts[target.part] + rows.start, target.columns.start
            self._add_blocks(exact.square_(), noise, block, first)

    def _add_blocks(
        self, signal: Tensor, noise: Tensor, block: tuple[int, int], first: tuple[int, int]
    ) -> None:
        signal_per, noise_per = _block_sums(signal, block), _block_sums(noise, block)
        self.signal += float(signal_per.sum())
        self.noise += float(noise_per.sum())
        ratio = torch.where(noise_per > 0, signal_per / noise_per, math.inf)
        if not ratio.numel():
            return
        lowest = int(ratio.argmin())
        value = float(ratio.flatten()[lowest])
        db = 10.0 * math.log10(value) if 0.0 < value < math.inf else (math.inf if value else -math.inf)
        if db < self.worst_db:
            at = torch.unravel_index(torch.tensor(lowest), ratio.shape)
            self.worst_db = db
            self.worst_block = first[0] + int(at[-2]) * block[0], first[1] + int(at[-1]) * block[1]


def _block_sums(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Sums over blocks of the last two dimensions, float64; the last row and column of blocks may be part-filled."""
    rows, columns = values.shape[-2:]
    pad = -columns % block[1], -rows % block[0]
    values = functional.pad(values, (0, pad[0], 0, pad[1]))
    down, across = (rows + pad[1]) // block[0], (columns + pad[0]) // block[1]
    cut = values.reshape(*values.shape[:-2], down, block[0], across, block[1])
    return cut.sum((-3, -1), dtype=torch.float64)
