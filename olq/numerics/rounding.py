"""Float32 to element codes and back, by exact steps.

There is one rounding, to nearest, ties to even, and the sign of zero is kept.
"""

import torch
from torch import Tensor

from olq.formats import E2M1, E4M3
from olq.numerics.chunks import Scratch


def round_to_e4m3_(x: Tensor, codes: Tensor) -> None:
    """Write the E4M3 codes of `x` to `codes` (uint8, same shape, any strides). Overwrites `x`; it holds no
    NaN.

    The clamp comes first, because torch's own cast saturates in some builds and makes NaN in others.
    """
    x.clamp_(-E4M3.max, E4M3.max)
    codes.view(torch.float8_e4m3fn).copy_(x)


def round_to_e2m1_(x: Tensor, scratch: Scratch) -> Tensor:
    """The E2M1 codes of `x` (contiguous float32, no NaN) as contiguous uint8 in the buffer "codes".
    Overwrites `x`.

    For a = |x| let p = max(1, 2 ** floor(log2 a)): codes are p / 2 apart there. M = 1.5 * 2**22 * p is a
    float32 whose last place is worth p / 2, so that one float32 addition, a + M, does the rounding, ties to
    even; the difference of the bit patterns counts the steps of p / 2, and each doubling of p stands for
    two more codes.
    """
    codes = scratch.take("codes", x.shape, torch.uint8)
    sign = scratch.take("sign", x.shape, torch.uint8)
    magic = scratch.take("helper", x.shape, torch.float32)
    bits, magic_bits = x.view(torch.int32), magic.view(torch.int32)

    sign.copy_(torch.bitwise_right_shift(bits, 28, out=magic_bits)).bitwise_and_(E2M1.sign_mask)
    x.abs_().clamp_(max=E2M1.max)
    torch.bitwise_and(bits, 0x7F800000, out=magic_bits)
    magic_bits.clamp_(min=0x3F800000).add_((22 << 23) + (1 << 22))
    x.add_(magic)
    bits.sub_(magic_bits)
    # The exponent field of M is 127 + 22 + log2 p, the bit below it is set: shifted, 2 * (149 + log2 p) + 1.
    bits.add_(magic_bits.bitwise_right_shift_(22)).sub_(2 * 149 + 1)
    return codes.copy_(bits).bitwise_or_(sign)


def powers_of_two(bytes_: Tensor) -> Tensor:
    """E8M0 bytes (uint8 or int32) to float32 decode scales, exactly: 2 ** (byte - 127), NaN for 255.

    Byte 0 is 2 ** -127, a subnormal: shifting the byte into the exponent field would give 0.
    """
    bits = bytes_.to(torch.int32)
    value = torch.where(bits == 0, 0x00400000, bits << 23)
    return torch.where(bits == 255, 0x7FC00000, value).view(torch.float32)


def e2m1_values_(packed: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
    """Decode packed nibbles (contiguous uint8 [..., c / 2], low nibble first) to contiguous float32 [..., c].

    Values are 2 ** -14 of what the codes stand for: an E2M1 code, moved to the top of float16's fields, is
    that float16, subnormal included; `E2M1_STEP` undoes it. Returns `out`.
    """
    wide = scratch.take("wide", packed.shape, torch.int16)
    wide.copy_(packed)
    # As two bytes, low first: code | code << 4 leaves the low nibble in the first byte, the high one in the
    # second.
    wide.bitwise_or_(torch.bitwise_left_shift(wide, 4)).bitwise_and_(0x0F0F)
    half = scratch.take("half", out.shape, torch.int16)
    half.copy_(wide.view(torch.uint8).view(out.shape))
    sign = torch.bitwise_and(half, 0x8).bitwise_left_shift_(12)
    half.bitwise_and_(0x7).bitwise_left_shift_(9).bitwise_or_(sign)
    return out.copy_(half.view(torch.float16))


E2M1_STEP = 2.0**14
"""See `e2m1_values_`; a power of two, so that it may be folded into a scale without rounding."""
