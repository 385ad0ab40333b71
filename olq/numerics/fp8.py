"""FP8: E4M3 codes with one float32 decode scale for a row, a block or the whole matrix.

Letters   n, k = rows and columns of the tensor at hand; unit = the elements that share a scale.
Value     w[i, j] ~ code[i, j] * scale[i / block_rows, j / block_columns]
Encode    code = E4M3(clamp(x * r, +-448)), r = 1 / scale once a unit
Spec      docs/formats/fp8.md
"""

import math

import torch
from torch import Tensor

from olq.numerics.chunks import Scratch, boxes, grid_of, pieces, spread, unit_of
from olq.numerics.rounding import e4m3_values_, round_to_e4m3_
from olq.numerics.scales import fp8_power_of_two_scale, fp8_scale, poisoned
from olq.numerics.source import Source, source_bytes


def quantize_(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    *,
    power_of_two: bool = False,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    """Quantize into storage of the caller.

    Args:
        source: [*lead, n, k], a floating type, any strides, any device.
        codes: uint8 [*lead, n, k], any strides; E4M3 codes.
        scale: float32 [*lead, *grid], any strides; decode scales.
        block: (rows, columns) of a unit; 0 is the whole extent, so (0, 0), (1, 0) and (128, 128) are the
            usual ones.
        power_of_two: the least power of two without saturation instead of amax / 448.
        through: dtype to which each element is rounded first; None keeps it.
        saturate: make non-finite elements finite first. Without it the scale of their unit becomes NaN, its
            codes 0.

    Scratch: under 8 MB, whatever the size.
    """
    choose = fp8_power_of_two_scale if power_of_two else fp8_scale
    scratch = Scratch(source.numel(), codes.device, source_bytes(source, through))
    reader = Source(source, through, saturate, scratch)
    if not source.numel():
        scale.fill_(1.0)
    for box in boxes(source.shape, unit_of(source.shape, block), scratch.elements):
        parts, target = reader.pieces(box), codes[box.index]
        amax = parts.magnitudes()
        bad, (unit_scale, factor) = poisoned(amax), choose(amax)
        if bad is not None:
            unit_scale.masked_fill_(bad, math.nan)
            factor.masked_fill_(bad, 0.0)
        scale[box.unit_index] = unit_scale
        for index, x, elements in parts:
            if bad is not None:
                elements.masked_fill_(spread(bad), 0.0)
            elements.mul_(spread(factor))
            # x * r is at most 448 * (1 + 2**-22), by three roundings of 2**-24, which still rounds to 448:
            # the formula's clamp would change no code, and is a pass over memory.
            round_to_e4m3_(x, target[index], may_exceed=False)


def dequantize_(codes: Tensor, scale: Tensor, out: Tensor, block: tuple[int, int]) -> None:
    """Decode: code * scale in float32 (one rounding), then rounded to `out`'s dtype.

    Args:
        codes: uint8 [*lead, n, k], any strides.
        scale: float32 [*lead, *grid], any strides.
        out: float32, bfloat16 or float16 [*lead, n, k], any strides.
        block: as for `quantize_`.

    Scratch: under 8 MB, whatever the size.
    """
    scratch = Scratch(codes.numel(), codes.device, 8)
    for piece in pieces(codes.shape, unit_of(codes.shape, block), scratch.elements):
        part = codes[piece.index]
        x = e4m3_values_(part, scratch.take("x", part.shape, torch.float32), scratch)
        x.view(piece.split_shape).mul_(spread(scale[piece.unit_index]))
        out[piece.index] = x


def scale_shape(shape: torch.Size | tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """[*lead, *grid]: the shape of the scales of a [*lead, n, k] tensor."""
    return (*shape[:-2], *grid_of(shape, block))
