"""NVFP4: E2M1 codes, two to a byte, with an E4M3 scale for each 16 along k and a float32 scale for the
tensor.

Letters   n, k = rows and columns of the tensor at hand; blocks are 1 x 16, the last of a row may be shorter.
Value     w[i, j] ~ (code[i, j] * SF[i, j / 16]) * s2
Encode    s2 = amax / 2688, SF = E4M3(min(b / (6 * s2), 448)), r = 1 / (SF * s2), code = E2M1(clamp(x * r,
          +-6))
Spec      docs/formats/nvfp4.md
"""

import math

import torch
from torch import Tensor

from olq.formats import E4M3, NVFP4_BLOCK
from olq.numerics.chunks import Scratch, boxes, pieces, spread
from olq.numerics.places import Places
from olq.numerics.rounding import E2M1_STEP, e2m1_values_, e4m3_values, round_to_e2m1_
from olq.numerics.scales import nvfp4_block_scale, nvfp4_tensor_scale, poisoned
from olq.numerics.source import Source, source_bytes

_UNIT = (1, NVFP4_BLOCK)
_BYTES_TO_ENCODE = 12  # magnitudes, a third float32, codes, signs, pairs
_BYTES_TO_DECODE = 10  # values, float16 patterns, their signs, pairs, packed
_NAN_BYTE = E4M3.nan_codes[0]


def tensor_scale_(
    source: Tensor, scale_2: Tensor, *, through: torch.dtype | None = None, saturate: bool = False
) -> None:
    """Write s2 = amax / 2688 of each matrix: 1.0 for zeros, not below 2**-117, NaN if an element is not
    finite.

    Args:
        source: [*lead, n, k], a floating type, any strides, any device.
        scale_2: float32 [*lead], 0-d without leading dimensions, any strides; the decode scale.
        through: dtype to which each element is rounded first; None keeps it.
        saturate: make non-finite elements finite first.

    Scratch: under 8 MB, whatever the size.
    """
    scratch = Scratch(source.numel(), scale_2.device, source_bytes(source, through))
    reader = Source(source, through, saturate, scratch)
    # The running maximum is kept in the result: there may be as many matrices as elements.
    scale_2.zero_()
    for box in boxes(source.shape, (1, max(source.shape[-1], 1)), scratch.elements):
        amax = reader.pieces(box).magnitudes().amax((-2, -1))
        running = scale_2[box.lead]
        running.copy_(torch.maximum(running, amax))
    for piece in pieces((*scale_2.shape, 1, 1), (1, 1), scratch.elements):
        amax = scale_2[piece.lead]
        amax.copy_(nvfp4_tensor_scale(amax))


def quantize_(
    source: Tensor,
    codes: Tensor,
    places: Places,
    scale_2: Tensor,
    *,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    """Quantize into storage of the caller, with a tensor scale that is already there.

    Args:
        source: [*lead, n, k], a floating type, any strides, any device.
        codes: uint8 [*lead, n, ceil(k / 2)], any strides; low nibble first, a missing last high nibble is 0.
        places: where the n x ceil(k / 16) scale bytes go.
        scale_2: float32 [*lead], 0-d without leading dimensions. Positive and finite; any other value makes
            all scale bytes of its matrix NaN (0x7F) and all codes 0.
        through: dtype to which each element is rounded first; None keeps it.
        saturate: make non-finite elements finite first. Without it their block's byte becomes 0x7F, its
            codes 0.

    Scratch: under 8 MB, whatever the size.
    """
    scratch = Scratch(source.numel(), codes.device, source_bytes(source, through) + _BYTES_TO_ENCODE)
    reader = Source(source, through, saturate, scratch)
    unusable = _unusable_scale(scale_2)
    for box in boxes(source.shape, _UNIT, scratch.elements):
        parts, target = reader.pieces(box), codes[_packed(box.index)]
        amax = parts.magnitudes().abs_()  # of zeros it may be -0.0, whose scale byte would have a sign
        s2 = scale_2[box.lead][..., None, None]
        byte, factor = nvfp4_block_scale(amax, s2)
        bad = poisoned(amax)
        if unusable:
            bad = ~(torch.isfinite(amax) & (s2 > 0) & (s2 < math.inf))
        if bad is not None:
            byte = byte.masked_fill(bad, _NAN_BYTE)
        places.write(box.unit_index, byte)
        for index, x, elements in parts:
            magnitude = torch.abs(x, out=scratch.take("|x|", x.shape, torch.float32))
            blocks = magnitude.view(elements.shape)
            if bad is not None:
                for t in (elements, blocks):
                    t.masked_fill_(spread(bad), 0.0)
            blocks.mul_(spread(factor))  # |x| * r is |x * r|, bit for bit
            pack(round_to_e2m1_(magnitude, x, scratch), target[_packed(index)], scratch)


def _unusable_scale(scale_2: Tensor) -> bool:
    """Whether some tensor scale may be other than positive and finite; only a CPU can say that none is."""
    if scale_2.device.type != "cpu" or not scale_2.numel():
        return True
    least, most = torch.aminmax(scale_2)
    return not (float(least) > 0.0 and float(most) < math.inf)


def pack(codes: Tensor, packed: Tensor, scratch: Scratch) -> None:
    """Write two codes a byte, low nibble first: contiguous uint8 [..., c] to [..., ceil(c / 2)], any strides."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(torch.int16)
    high = torch.bitwise_right_shift(pairs, 4, out=scratch.take("wide", pairs.shape, torch.int16))
    packed.copy_(high.bitwise_or_(pairs))


def _packed(index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Index in packed codes of elements that start on a block, so on a byte."""
    *rest, columns = index
    return (*rest, slice(columns.start // 2, -(-columns.stop // 2)))


def dequantize_(codes: Tensor, places: Places, scale_2: Tensor, out: Tensor) -> None:
    """Decode: (code * SF) * s2 in float32, the first product exact; then rounded to `out`'s dtype.

    Args:
        codes: uint8 [*lead, n, ceil(k / 2)], any strides.
        places: where the n x ceil(k / 16) scale bytes are.
        scale_2: float32 [*lead], 0-d without leading dimensions.
        out: float32, bfloat16 or float16 [*lead, n, k], any strides; its k says how many nibbles count.

    Scratch: under 8 MB, whatever the size.
    """
    scratch = Scratch(2 * codes.numel(), codes.device, _BYTES_TO_DECODE)
    for piece in pieces((*codes.shape[:-1], 2 * codes.shape[-1]), _UNIT, scratch.elements):
        part = codes[_packed(piece.index)]
        packed = scratch.take("packed", part.shape, torch.uint8).copy_(part)
        x = scratch.take("x", (*part.shape[:-1], 2 * part.shape[-1]), torch.float32)
        e2m1_values_(packed, x, scratch)
        block = e4m3_values(places.read(piece.unit_index)).mul_(E2M1_STEP)
        s2 = scale_2[piece.lead][..., None, None, None, None]
        x.view(piece.split_shape).mul_(spread(block)).mul_(s2)
        target = out[piece.index]  # one column short of x where the last nibble is padding
        target.copy_(x[..., : target.shape[-1]])
