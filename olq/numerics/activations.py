"""Activations to FP8 in groups along K: scales as packed exponents, and the product of SiLU and a gate on the way.

Letters   M = rows (tokens), K = columns, G = ceil(K / group), W = ceil(G / 4) words.
Value     x[m, k] ~ code[m, k] * scale[m, k / group]
Word      [m, w] holds the exponents of groups 4w .. 4w + 3, little-endian; 0 where there is no group
Spec      docs/formats/activations.md
Elsewhere one rule for codes and scales: olq.numerics.fp8 chooses and rounds, also here. Rows with a scale
          each, groups with float32 scales, MXFP8 and NVFP4 are what weights have: fp8, mxfp8, nvfp4.
"""

import torch
from torch import Tensor

from olq.numerics import chunks, fp8
from olq.numerics.chunks import Box, boxes
from olq.numerics.silu import BUFFERS, silu_mul

_LANES = 4  # exponents a word
_BYTES_AN_ELEMENT = 4 * BUFFERS + 8  # masks, and what quantizing takes
_WORD_BUDGET = 1 << 20  # elements; only their scales need memory
_LEAST = 16  # elements for which `boxes` keeps every word whole


def quantize_words_(source: Tensor, codes: Tensor, words: Tensor, group: int) -> None:
    """Quantize with power-of-two scales, packed.

    Args:
        source: [*lead, M, K], a floating type, any strides, any device.
        codes: uint8 [*lead, M, K], any strides; E4M3 codes.
        words: int32 [*lead, M, W], any strides. Whole words are written, lanes without a group with 0.
        group: columns that share a scale.

    A group with an infinity or a NaN gets exponent 255, which is NaN, and codes 0. Scratch: under 8 MB.
    """
    budget = max(_WORD_BUDGET, _LANES * group, _LEAST)
    for box in boxes(source.shape, (1, _LANES * group), budget):
        scale = _scales_of(box, source, words.device, group)
        fp8.quantize_(source[box.index], codes[box.index], scale, (1, group), power_of_two=True)
        words[box.unit_index] = _pack(scale)


def silu_mul_quantize_(
    gate: Tensor,
    up: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int,
    *,
    power_of_two: bool,
    limit: float | None,
    alpha: float,
    beta: float,
    through: torch.dtype | None,
) -> None:
    """Quantize y = gate * sigmoid(alpha * gate) * (up + beta), which is never in memory as a whole.

    Args:
        gate: [*lead, M, K], a floating type, any strides, any device.
        up: like `gate`.
        codes: uint8 [*lead, M, K], any strides; E4M3 codes.
        scale: int32 [*lead, M, W], as in `quantize_words_`; or float32 [*lead, M, G] decode scales, NaN for a
            group with a y that is infinite or NaN. Any strides.
        group: columns that share a scale.
        power_of_two: for float32 scales; words always are.
        limit: None, or positive: see olq.numerics.silu, like alpha and beta.
        alpha: factor inside the sigmoid.
        beta: added to `up`.
        through: dtype to which y is rounded before it is quantized; None keeps float32.

    Scratch: under 8 MB.
    """
    packed = scale.dtype == torch.int32
    budget = max(chunks.BYTES // _BYTES_AN_ELEMENT, _LANES * group, _LEAST)
    work = torch.empty(BUFFERS, min(gate.numel(), budget), device=codes.device)
    for box in boxes(gate.shape, (1, _LANES * group), budget):
        part = gate[box.index]
        buffers = [buffer[: part.numel()].view(part.shape) for buffer in work]
        y = silu_mul(part, up[box.index], buffers, limit=limit, alpha=alpha, beta=beta)
        if packed:
            group_scale = _scales_of(box, gate, scale.device, group)
        else:
            first, last = box.columns.start // group, -(-box.columns.stop // group)
            group_scale = scale[(*box.lead, box.rows, slice(first, last))]
        fp8.quantize_(
            y,
            codes[box.index],
            group_scale,
            (1, group),
            power_of_two=power_of_two or packed,
            through=through,
        )
        if packed:
            scale[box.unit_index] = _pack(group_scale)


def words_shape(shape: torch.Size | tuple[int, ...], group: int) -> tuple[int, ...]:
    """[*lead, M, W]: the shape of the words of a [*lead, M, K] tensor."""
    groups = -(-shape[-1] // group)
    return (*shape[:-1], -(-groups // _LANES))


def _scales_of(box: Box, tensor: Tensor, device: torch.device, group: int) -> Tensor:
    """Room for the float32 scales of one box."""
    part = tensor[box.index]
    return torch.empty(*part.shape[:-1], -(-part.shape[-1] // group), device=device)


def _pack(scale: Tensor) -> Tensor:
    """Float32 powers of two, or NaN, [..., g] to words [..., ceil(g / 4)]."""
    g = scale.shape[-1]
    # Fresh words seen as bytes, not bytes seen as words: torch refuses the latter for some shapes.
    words = torch.empty(*scale.shape[:-1], -(-g // _LANES), dtype=torch.int32, device=scale.device)
    lanes = words.view(torch.uint8)
    lanes[..., :g] = scale.view(torch.int32) >> 23  # no sign, and normal: fp8 scales are 2**-126 or more
    lanes[..., g:] = 0
    return words
