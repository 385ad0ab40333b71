"""Largest magnitude of a unit to its decode scale, and to the factor that encodes with it.

Division is IEEE float32 and always by a tensor on the same device: eager CUDA turns `t / python_number`,
and a division by a zero-dimensional CPU tensor, into a multiplication by the reciprocal, which differs in
the last bit. Exponents are chosen on the bits, never through log2.

A unit with an infinity or a NaN gets a NaN scale; the caller turns its elements into zeros (`poisoned`).
"""

import math

import torch
from torch import Tensor

from olq.formats import (
    E4M3,
    E8M0_MAX,
    FP8_MIN_SCALE,
    FP8_ZERO_SCALE,
    NVFP4_MIN_TENSOR_SCALE,
    NVFP4_TENSOR_RANGE,
    RCEIL,
    ExponentRule,
)
from olq.numerics.rounding import e4m3_values

_EXPONENT_OF_448 = 8
_POINT = 23  # bits of a float32 after the point


def poisoned(amax: Tensor) -> Tensor | None:
    """Which units hold an infinity or a NaN: bool like `amax`, or None when it is known that none does.

    Only a CPU can say None: looking would make a GPU's stream wait.
    """
    if amax.device.type == "cpu" and (amax.numel() == 0 or float(amax.amax()) < math.inf):
        return None
    return ~torch.isfinite(amax)


def fp8_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """s = amax / 448, not below 2**-126, 1.0 for zeros; and r = 1 / s. Both IEEE float32, both finite.

    Args:
        amax: float32, at least 0, any shape. Infinity or NaN gives a NaN s; then r means nothing.

    Returns:
        (decode scale, encode factor), float32, like `amax`.
    """
    scale = amax / torch.full_like(amax, E4M3.max)
    scale.clamp_(min=FP8_MIN_SCALE).masked_fill_(amax == 0, FP8_ZERO_SCALE)
    return scale, scale.reciprocal()


def fp8_power_of_two_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Least power of two without saturation, not below 2**-126, 1.0 for zeros; its exact reciprocal."""
    field = _exponent_field_(amax.clone(), RCEIL).clamp_(min=1)
    field.masked_fill_(amax == 0, 127)
    return (field << _POINT).view(torch.float32), ((254 - field) << _POINT).view(torch.float32)


def e8m0_scale_(amax: Tensor, rule: ExponentRule) -> tuple[Tensor, Tensor]:
    """The E8M0 byte under `rule`, 0 for zeros, and the factor 2 ** (127 - byte). Overwrites `amax`.

    Finite blocks get bytes 0 .. 247, so that the factor is a normal float32.

    Returns:
        (bytes as int32, encode factor float32), like `amax`. For a poisoned unit both mean nothing.
    """
    byte = _exponent_field_(amax, rule).clamp_(0, E8M0_MAX - 1)
    # (254 - byte) << 23 in one operator
    return byte, torch.rsub(byte, 254 << _POINT, alpha=1 << _POINT).view(torch.float32)


def _exponent_field_(amax: Tensor, rule: ExponentRule) -> Tensor:
    """Exponent field of the decode scale before it is cut to a range; the carry is the rule's bump."""
    bits = amax.view(torch.int32).add_(rule.carry)
    return bits.bitwise_right_shift_(_POINT).sub_(_EXPONENT_OF_448)


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """s2 = amax / 2688 (IEEE float32), not below 2**-117, 1.0 for zeros, NaN for a poisoned tensor."""
    scale = amax / torch.full_like(amax, NVFP4_TENSOR_RANGE)
    scale.clamp_(min=NVFP4_MIN_TENSOR_SCALE).masked_fill_(amax == 0, 1.0)
    return scale.masked_fill_(~torch.isfinite(amax), math.nan)


def nvfp4_block_scale(amax: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    """SF = E4M3(min(amax / (6 * s2), 448)) and r = 1 / (SF * s2), 0 where that is not a finite number.

    Args:
        amax: [..., down, across] of blocks, float32, contiguous.
        scale_2: float32, broadcasts with `amax`.

    Returns:
        (SF as uint8 E4M3 codes, encode factor float32), like `amax`. Where amax is infinite or NaN, or s2
        is not positive and finite, both mean nothing.
    """
    ratio = (amax / (scale_2 * 6.0)).clamp_(max=E4M3.max)
    code = ratio.to(torch.float8_e4m3fn).view(torch.uint8)
    factor = e4m3_values(code).mul_(scale_2).reciprocal_()
    return code, torch.nan_to_num(factor, nan=0.0, posinf=0.0, out=factor)
