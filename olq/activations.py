"""Quantize activations into new memory: codes, and decode scales in the order that a matrix kernel reads.

Each function makes its outputs in olq.alloc and writes every byte of them, padding included. Each is one operator
for torch.compile, which does not ask how many rows there are. Those who own the memory call the operators of the
same arithmetic that write into it: see olq.ops.

Letters   M = rows (tokens), K = columns, G = ceil(K / group) scales a row.
Value     x[m, k] ~ code[m, k] * scale[m, k / group], by the rules that weights have.
Input     [*lead, M, K] float32, bfloat16, float16 or float64, any strides; only read, and no gradient flows.
Hot       no data is an error: a group with an infinity or a NaN has a scale that is NaN, and codes 0. Nothing
          waits for a GPU. Scratch under 8 MB in the reference.
Spec      docs/formats/activations.md
"""

import torch
from torch import Tensor

from olq import ops as _ops  # noqa: F401  (declares the operators)
from olq.alloc.outputs import FP8_GROUP, BlockScaleLayout, CodesAndScale, GroupScaleLayout
from olq.errors import LayoutError

__all__ = [
    "quantize_fp8_group",
    "quantize_fp8_token",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "silu_mul_quantize_fp8",
]


def quantize_fp8_token(x: Tensor, *, power_of_two: bool = False) -> CodesAndScale:
    """E4M3 codes and a decode scale for each row.

    Args:
        x: [*lead, M, K].
        power_of_two: the least power of two without saturation instead of amax / 448.

    Returns:
        codes: uint8 [*lead, M, K].
        scale: float32 [*lead, M, 1]; 1.0 for a row of zeros or without columns.

    Raises:
        LayoutError: a dtype or a shape does not fit.
    """
    return CodesAndScale(*torch.ops.olq.quantize_fp8_token(x.detach(), power_of_two))


def quantize_fp8_group(
    x: Tensor,
    *,
    scale_layout: GroupScaleLayout = "row_major",
    group: int = FP8_GROUP,
    power_of_two: bool = False,
) -> CodesAndScale:
    """E4M3 codes and a decode scale for each row and `group` columns; the last group may be part-filled.

    Args:
        x: [*lead, M, K].
        scale_layout: "row_major" or "mn_major" float32, or "ue8m0_words": exponents, four to an int32.
        group: 1 to 4096 columns.
        power_of_two: for float32 scales; words always are.

    Returns:
        codes: uint8 [*lead, M, K].
        scale: as `olq.alloc.fp8_group_output` has it; 1.0 for a group of zeros.

    Raises:
        LayoutError: a dtype, a shape, the layout or the group does not fit.
    """
    return CodesAndScale(*torch.ops.olq.quantize_fp8_group(x.detach(), scale_layout, group, power_of_two))


def quantize_mxfp8(
    x: Tensor, *, scale_layout: BlockScaleLayout = "linear", rule: str = "RCEIL"
) -> CodesAndScale:
    """E4M3 codes and an E8M0 byte for each row and 32 columns; the last block may be part-filled.

    Args:
        x: [*lead, M, K].
        scale_layout: "linear" or "swizzled_128x4".
        rule: how the exponent is chosen, a name in `olq.formats.EXPONENT_RULES`.

    Returns:
        codes: uint8 [*lead, M, K].
        scale: as `olq.alloc.mxfp8_output` has it; byte 0 for a block of zeros, 255 is NaN.

    Raises:
        LayoutError: a dtype, a shape or the layout does not fit.
        UnknownNameError: no rule has that name.
    """
    return CodesAndScale(*torch.ops.olq.quantize_mxfp8(x.detach(), scale_layout, rule))


def quantize_nvfp4(x: Tensor, scale_2: Tensor, *, scale_layout: BlockScaleLayout = "linear") -> CodesAndScale:
    """E2M1 codes, two a byte, and an E4M3 byte for each row and 16 columns; the last block may be part-filled.

    Args:
        x: [*lead, M, K].
        scale_2: float32 [*lead], the decode scale of the whole tensor: calibrated, or amax / 2688. A block
            that exceeds 2688 * scale_2 saturates. Not positive and finite makes all scale bytes NaN.
        scale_layout: "linear" or "swizzled_128x4".

    Returns:
        codes: uint8 [*lead, M, ceil(K / 2)], low nibble first; with K odd the last high nibble is 0.
        scale: as `olq.alloc.fp4_output` has it; byte 0 for a block of zeros, 0x7F is NaN.

    Raises:
        LayoutError: a dtype, a shape or the layout does not fit.
    """
    return CodesAndScale(*torch.ops.olq.quantize_nvfp4(x.detach(), scale_2.detach(), scale_layout))


def silu_mul_quantize_fp8(
    gate_up: Tensor,
    *,
    interleaved: bool = False,
    scale_layout: GroupScaleLayout = "ue8m0_words",
    group: int = FP8_GROUP,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> CodesAndScale:
    """Quantize y = gate * sigmoid(alpha * gate) * (up + beta), which is never in memory as a whole.

    The defaults are SiLU; gpt-oss has limit 7.0, alpha 1.702, beta 1.0 and interleaved columns.

    Args:
        gate_up: [*lead, M, 2 H], the gate's columns before those of up.
        interleaved: gate and up take turns instead: even columns are the gate's.
        scale_layout: as for `quantize_fp8_group`.
        group: 1 to 4096 columns.
        power_of_two: for float32 scales; words always are.
        limit: None, or positive: the gate is cut above, up on both sides, before anything else.
        alpha: factor inside the sigmoid.
        beta: added to up.
        through: dtype to which y is rounded before it is quantized, as an unfused kernel would write it; None
            keeps float32.

    Returns:
        codes: uint8 [*lead, M, H].
        scale: as `olq.alloc.fp8_group_output` has it for H columns.

    Raises:
        LayoutError: the columns can't be halved, or a dtype, a shape, the layout, the group or a number does
            not fit.
    """
    if gate_up.shape[-1] % 2:
        raise LayoutError(
            "Gate and up have as many columns as each other.",
            where="silu_mul_quantize_fp8, argument 'gate_up'",
            found=f"shape {tuple(gate_up.shape)}",
            need="[*lead, M, 2 H]",
            remedy="pass the output of the fused gate and up projection, without its padding",
        )
    x = gate_up.detach()
    half = x.shape[-1] // 2
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return CodesAndScale(
        *torch.ops.olq.silu_mul_quantize_fp8(
            gate, up, scale_layout, group, power_of_two, limit, alpha, beta, through
        )
    )
