"""Float32 to element codes and back, by exact steps.

There is one rounding, to nearest, ties to even, and the sign of zero is kept.
"""

import torch
from torch import Tensor

from olq.formats import E2M1, E4M3
from olq.numerics.chunks import Scratch

_ONE_APART = 1.5 * 2**23
"""Neighbouring float32 are 1 apart here, and the low byte of its bits is 0."""


def round_to_e4m3_(x: Tensor, codes: Tensor, *, may_exceed: bool = True) -> None:
    """Write the E4M3 codes of `x` to `codes`.

    Args:
        x: float32 without NaN; overwritten.
        codes: uint8, same shape, any strides.
        may_exceed: False says that no magnitude is above 448, by the rule that chose the scale. Otherwise a clamp
            comes first, because torch's own cast saturates in some builds and makes NaN in others.
    """
    if may_exceed:
        x.clamp_(-E4M3.max, E4M3.max)
    codes.view(torch.float8_e4m3fn).copy_(x)


def e4m3_values_(codes: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
    """Decode E4M3 codes (uint8, any strides) to contiguous float32, exactly, NaN for 0x7F and 0xFF. Returns `out`.

    By a table of the 256 values: torch's own cast takes six times as long on a CPU.
    """
    index = scratch.take("index", codes.shape, torch.int32).copy_(codes)
    torch.index_select(_e4m3_table(codes.device), 0, index.view(-1), out=out.view(-1))
    return out


def e4m3_values(codes: Tensor) -> Tensor:
    """`e4m3_values_` into new memory: for block scales, which are few."""
    return _e4m3_table(codes.device).index_select(0, codes.to(torch.int32).flatten()).view(codes.shape)


def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)


def round_to_e2m1_(magnitude: Tensor, x: Tensor, scratch: Scratch) -> Tensor:
    """The E2M1 codes of `magnitude` with the signs of `x`, in the buffer "codes".

    Codes are steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6, so that code(a) = round(min(2 a, a + 2, a / 2 + 4, 7)).
    Rounding is monotone, so each of the four is rounded by itself: by one addition to 1.5 * 2**23, where neighbouring
    float32 are 1 apart; products with powers of two are exact, and even offsets keep ties even. The code is the low
    byte of the sum's bits.

    Args:
        magnitude: contiguous float32, at least 0, infinity allowed.
        x: like `magnitude`; overwritten.
        scratch: has room for a float32 buffer "third" and the byte buffers "codes" and "sign".

    Returns:
        contiguous uint8, like `magnitude`.
    """
    codes = scratch.take("codes", x.shape, torch.uint8)
    sign = scratch.take("sign", x.shape, torch.uint8)
    third = scratch.take("third", x.shape, torch.float32)
    torch.bitwise_right_shift(x.view(torch.int32), 28, out=third.view(torch.int32))
    sign.copy_(third.view(torch.int32)).bitwise_and_(E2M1.sign_mask)

    torch.add(scratch.constant(_ONE_APART), magnitude, alpha=2, out=x)
    torch.minimum(x, torch.add(magnitude, _ONE_APART + 2, out=third), out=x)
    torch.minimum(x, torch.add(scratch.constant(_ONE_APART + 4), magnitude, alpha=0.5, out=third), out=x)
    x.clamp_(max=_ONE_APART + E2M1.max_code)
    return codes.copy_(x.view(torch.int32)).bitwise_or_(sign)


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
