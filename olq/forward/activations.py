"""Quantize x for a product, and decode what was quantized, for each method and its parameter `activations`.

    fp8      tensor, token, group   one float32 scale for all of x, for a row, for a row and 128 columns
    mxfp8    group                  an E8M0 byte for a row and 32 columns, by the method's `rule`
    nvfp4    group                  an E4M3 byte for a row and 16 columns, and a float32 scale for all of x

The rules are those of weights: docs/formats/. A unit with an infinity or a NaN has a scale that is NaN, and so is what
is computed from it. Nothing waits for a GPU.

Letters   M, K = rows and columns of x.
"""

import torch
from torch import Tensor

from olq import ops as _ops  # noqa: F401  (declares the operators)
from olq.forward.facts import Weight

FP8_UNITS = {"tensor": (0, 0), "token": (1, 0), "group": (1, 128)}
"""Rows and columns of x that share a scale; 0 is all of them."""


def quantize_fp8(
    x: Tensor, activations: str, power_of_two: bool, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """E4M3 codes and float32 decode scales.

    Args:
        x: [M, K].
        activations: "tensor", "token" or "group".
        power_of_two: whether scales are powers of two.
        rows: M', at least M: rows of the codes, and of the scales for "group". Those after M hold codes 0, scales 1.

    Returns:
        codes: uint8 [M', K].
        scale: tensor [1, 1], token [M, 1], group [M', ceil(K / 128)] with strides (1, M') if M' is a multiple of 4.
    """
    m, k = x.shape
    rows = m if rows is None else rows
    if activations == "token" and rows == m:
        return torch.ops.olq.quantize_fp8_token(x, power_of_two)
    if activations == "group" and rows == m:
        return torch.ops.olq.quantize_fp8_group(x, "mn_major", FP8_UNITS["group"][1], power_of_two)
    codes = x.new_empty(rows, k, dtype=torch.uint8)
    if activations == "group":
        scale = x.new_empty_strided((rows, -(-k // FP8_UNITS["group"][1])), (1, rows), dtype=torch.float32)
    else:
        scale = x.new_empty(1 if activations == "tensor" else m, 1, dtype=torch.float32)
    of_x = scale[:m] if activations == "group" else scale
    if rows > m:  # multiplied and then dropped, so they only have to be there
        codes[m:], scale[m:] = 0, 1.0
    torch.ops.olq.quantize_fp8_(x, codes[:m], of_x, *FP8_UNITS[activations], power_of_two, None, False)
    return codes, scale


def quantize_nvfp4(x: Tensor, scale_layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 codes, E4M3 bytes, and the float32 scale of all of x, from its largest magnitude.

    Returns:
        codes: uint8 [M, ceil(K / 2)].
        scale: uint8, as `olq.alloc.fp4_output` has it.
        scale_2: float32 [].
    """
    scale_2 = x.new_empty((), dtype=torch.float32)
    torch.ops.olq.nvfp4_tensor_scale_(x, scale_2, None, False)
    return (*torch.ops.olq.quantize_nvfp4(x, scale_2, scale_layout), scale_2)


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """x [M, K] quantized and decoded: float32 [M, K], each value one that the method's format has."""
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    if weight.method == "mxfp8":
        codes, scale = torch.ops.olq.quantize_mxfp8(x, "linear", weight.params.rule)
        torch.ops.olq.dequantize_mxfp8_(codes, scale, out, "linear", 0, 1, 0)
    elif weight.method == "nvfp4":
        codes, scale, scale_2 = quantize_nvfp4(x, "linear")
        torch.ops.olq.dequantize_nvfp4_(codes, scale, scale_2, out, "linear", 0, 1, 0)
    else:
        codes, scale = quantize_fp8(x, weight.activations, weight.params.scale == "power_of_two")
        torch.ops.olq.dequantize_fp8_(codes, scale, out, *FP8_UNITS[weight.activations])
    return out
