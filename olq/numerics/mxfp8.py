"""MXFP8: E4M3 codes with one E8M0 decode scale for each 32 along k.

Letters   n, k = rows and columns of the tensor at hand; blocks are 1 x 32, the last of a row may be shorter.
Value     w[i, j] = code[i, j] * 2 ** (byte[i, j / 32] - 127)
Encode    code = E4M3(clamp(x * 2 ** (127 - byte), +-448)); the product is exact
Rule      byte from the block's largest magnitude by a named rule of olq.formats; RCEIL never saturates
Spec      docs/formats/mxfp8.md
"""

import torch
from torch import Tensor

from olq.formats import E8M0_NAN, MXFP8_BLOCK, exponent_rule
from olq.numerics.chunks import Scratch, boxes, pieces, spread
from olq.numerics.places import Places
from olq.numerics.rounding import e4m3_values_, powers_of_two, round_to_e4m3_
from olq.numerics.scales import e8m0_scale_, poisoned
from olq.numerics.source import Source, source_bytes

_UNIT = (1, MXFP8_BLOCK)


def quantize_(
    source: Tensor,
    codes: Tensor,
    places: Places,
    *,
    rule: str = "RCEIL",
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    """Quantize into storage of the caller.

    Args:
        source: [*lead, n, k], a floating type, any strides, any device.
        codes: uint8 [*lead, n, k], any strides; E4M3 codes.
        places: where the n x ceil(k / 32) scale bytes go.
        rule: a name in `olq.formats.EXPONENT_RULES`.
        through: dtype to which each element is rounded first; None keeps it.
        saturate: make non-finite elements finite first. Without it the byte of their block becomes 255, its
            codes 0.

    Scratch: under 8 MB, whatever the size.
    """
    chosen = exponent_rule(rule)
    scratch = Scratch(source.numel(), codes.device, source_bytes(source, through))
    reader = Source(source, through, saturate, scratch)
    for box in boxes(source.shape, _UNIT, scratch.elements):
        parts, target = reader.pieces(box), codes[box.index]
        amax = parts.magnitudes()
        bad, (byte, factor) = poisoned(amax), e8m0_scale_(amax, chosen)
        if bad is not None:
            byte.masked_fill_(bad, E8M0_NAN)
        places.write(box.unit_index, byte)
        for index, x, blocks in parts:
            if bad is not None:
                blocks.masked_fill_(spread(bad), 0.0)
            blocks.mul_(spread(factor))
            round_to_e4m3_(x, target[index], may_exceed=chosen.saturates)


def dequantize_(codes: Tensor, places: Places, out: Tensor) -> None:
    """Decode: code * 2 ** (byte - 127), exact in float32 unless it leaves the range; then rounded to
    `out`'s dtype.

    Args:
        codes: uint8 [*lead, n, k], any strides.
        places: where the n x ceil(k / 32) scale bytes are.
        out: float32, bfloat16 or float16 [*lead, n, k], any strides.

    Scratch: under 8 MB, whatever the size.
    """
    scratch = Scratch(codes.numel(), codes.device, 8)
    for piece in pieces(codes.shape, _UNIT, scratch.elements):
        part = codes[piece.index]
        x = e4m3_values_(part, scratch.take("x", part.shape, torch.float32), scratch)
        x.view(piece.split_shape).mul_(spread(powers_of_two(places.read(piece.unit_index))))
        out[piece.index] = x
