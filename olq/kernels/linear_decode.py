"""Device functions: codes to operands of a matrix product, in registers. Imports triton.

What comes out is exact, or rounded once where `decode` rounds too; scales that would cost precision wait for the sum.

    e4m3_values     the codes' values
    e4m3_scaled     times an E8M0 scale, rounded to the product's dtype
    e2m1_values     times an E4M3 scale times `SMALLER`, which keeps the largest product, 6 * 448, below 1: exact

Codes come as int64 words of 8 E4M3 or 16 E2M1. The order of a word's values: of E4M3 that of its bytes; of E2M1 each
value of the first four beside that of the next four, since shifts and masks give such pairs: 0 4 1 5 2 6 3 7 ...
HARDWARE  see `rounding`.
"""

import triton
import triton.language as tl

from olq.kernels.launching import interpreted
from olq.kernels.rounding import e2m1_value, e4m3_value, power_of_two

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
SMALLER: tl.constexpr = tl.constexpr(2.0**-12)


@triton.jit
def _widened(x):
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def add_product(total, w, tile):
    """total + w @ tile, in float32. Triton's interpreter takes bfloat16 for integers there."""
    if _INTERPRETED:
        return total + tl.dot(_widened(w), _widened(tile), input_precision="ieee")
    return tl.dot(w, tile, total)


@triton.jit
def narrow(values, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Float32 rounded to float16 or bfloat16, to nearest, ties to even."""
    if tl.bfloat16 == DTYPE and not HARDWARE:  # Triton's interpreter cuts where it should round
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        return tl.where(values != values, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    """[..., 2, 2, 2] of eight tensors, in this order."""
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


# -- eight E4M3 codes ---------------------------------------------------------------------------------------


def _e4m3(dtype: str, scale: str = "") -> str:
    """PTX: eight values; $8 are their codes. `scale`: $9 is "one" in float32, or a "pair" of the dtype."""
    text = "{ .reg .b32 w0, w1, r, zero; .reg .b16 a, b, c, d; .reg .f32 p, q; mov.b64 {w0, w1}, $8;"
    text += "mov.b32 zero, 0x80008000;"  # -0 -0, which no sum changes
    for word in (0, 1):
        text += f"mov.b32 {{c, d}}, w{word};"
        for half, codes in enumerate("cd"):
            at = 4 * word + 2 * half
            text += f"cvt.rn.f16x2.e4m3x2 r, {codes};"
            if dtype != "f16" or scale == "one":
                text += "mov.b32 {a, b}, r; cvt.f32.f16 p, a; cvt.f32.f16 q, b;"
                if scale == "one":
                    text += "mul.rn.f32 p, p, $9; mul.rn.f32 q, q, $9;"
                text += f"cvt.rn.{dtype}x2.f32 r, q, p;"
            if scale == "pair":
                text += f"fma.rn.{dtype}x2 r, r, $9, zero;"
            text += f"mov.b32 {{${at}, ${at + 1}}}, r;"
    return text + "}"


_E4M3_BFLOAT16: tl.constexpr = tl.constexpr(_e4m3("bf16"))
_E4M3_FLOAT16: tl.constexpr = tl.constexpr(_e4m3("f16"))
_SCALED_BFLOAT16: tl.constexpr = tl.constexpr(_e4m3("bf16", "pair"))
_SCALED_FLOAT16: tl.constexpr = tl.constexpr(_e4m3("f16", "one"))
_PLAIN: tl.constexpr = tl.constexpr("=h," * 8 + "l")
_ONE: tl.constexpr = tl.constexpr("=h," * 8 + "l,f")
_PAIR: tl.constexpr = tl.constexpr("=h," * 8 + "l,r")


@triton.jit
def _code(codes, at: tl.constexpr, scale, DTYPE: tl.constexpr):
    return narrow(e4m3_value((codes >> (8 * at)) & 255) * scale, DTYPE, False)


@triton.jit
def _emulated(codes, scale, DTYPE: tl.constexpr):
    return _eight(
        _code(codes, 0, scale, DTYPE),
        _code(codes, 1, scale, DTYPE),
        _code(codes, 2, scale, DTYPE),
        _code(codes, 3, scale, DTYPE),
        _code(codes, 4, scale, DTYPE),
        _code(codes, 5, scale, DTYPE),
        _code(codes, 6, scale, DTYPE),
        _code(codes, 7, scale, DTYPE),
    )


@triton.jit
def e4m3_values(codes, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """[..., 2, 2, 2] values of int64 words."""
    if not HARDWARE:
        return _emulated(codes, 1.0, DTYPE)
    if tl.float16 == DTYPE:
        e = tl.inline_asm_elementwise(
            _E4M3_FLOAT16, _PLAIN, [codes], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )
    else:
        e = tl.inline_asm_elementwise(
            _E4M3_BFLOAT16, _PLAIN, [codes], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    return _eight(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7])


@triton.jit
def e8m0_factor(byte, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """What `e4m3_scaled` takes for E8M0 bytes (int32): a pair of bfloat16 as int32, or a float32."""
    if HARDWARE and tl.bfloat16 == DTYPE:
        bits = tl.where(byte == 0, 0x0040, byte << 7)  # 2**-127 is subnormal
        return tl.where(byte == 255, 0x7FC0, bits) * 0x10001
    else:
        return power_of_two(byte)


@triton.jit
def e4m3_scaled(codes, factor, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """[..., 2, 2, 2] values of int64 words times their scales, from `e8m0_factor`."""
    if not HARDWARE:
        return _emulated(codes, factor, DTYPE)
    if tl.float16 == DTYPE:
        e = tl.inline_asm_elementwise(
            _SCALED_FLOAT16, _ONE, [codes, factor], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )
    else:
        e = tl.inline_asm_elementwise(
            _SCALED_BFLOAT16, _PAIR, [codes, factor], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    return _eight(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7])


# -- sixteen E2M1 codes -------------------------------------------------------------------------------------

# In the fields of a 16-bit float, a code's sign and its three bits of magnitude, subnormal like the format's own, are
# the value times a power of two: of 2**-126 in bfloat16, of 2**-14 in float16. One multiplication, by the block's scale
# times the opposite power, puts that right and is exact. Masks take two codes of a 32-bit word at a time. In bfloat16
# sign and magnitude lie so far apart that the product with a sum of two powers moves both to their places at once; in
# float16 they would meet.


def _placed(dtype: str, codes: str, lower: int) -> str:
    """PTX: a = the codes that begin at bit `lower` of both halves, in a 16-bit float's fields; b is used up."""
    if dtype == "bf16":
        text = f"and.b32 a, {codes}, {0x000F000F << lower}; mul.lo.u32 a, a, {(1 << 12 - lower) + (1 << 6 - lower)};"
        return text + "and.b32 a, a, 0x81C081C0;"
    text = f"shl.b32 a, {codes}, {9 - lower}; and.b32 a, a, 0x0E000E00;"
    return text + f"shl.b32 b, {codes}, {12 - lower}; and.b32 b, b, 0x80008000; or.b32 a, a, b;"


def _e2m1(dtype: str) -> str:
    """PTX: 16 values of a block; $16 are their codes, $17 is a pair of factors."""
    text = "{ .reg .b32 w0, w1, v, a, b, zero; mov.b64 {w0, w1}, $16; mov.b32 zero, 0x80008000;"
    at = 0
    for word in ("w0", "w1"):
        text += f"shr.u32 v, {word}, 8;"
        for codes in (word, "v"):
            for lower in (0, 4):
                text += _placed(dtype, codes, lower)
                text += f"fma.rn.{dtype}x2 a, a, $17, zero; mov.b32 {{${at}, ${at + 1}}}, a;"
                at += 2
    return text + "}"


def _factors(dtype: str, count: int) -> str:
    """PTX: pairs of equal factors from the `count` lower E4M3 bytes of the word after them, lowest first."""
    power = {"bf16": 2.0 ** (126 - 12), "f16": 2.0 ** (14 - 12)}[dtype].hex()
    bits = (int(power.split("p")[1]) + 127) << 23
    text = f"{{ .reg .b16 a, b, c, d; .reg .b32 r; .reg .f32 p; mov.b32 {{a, b}}, ${count};"
    for first, pair in zip(range(0, count, 2), "ab", strict=False):
        text += f"cvt.rn.f16x2.e4m3x2 r, {pair}; mov.b32 {{c, d}}, r;"
        for at, of in enumerate("cd", first):
            text += f"cvt.f32.f16 p, {of}; mul.rn.f32 p, p, 0f{bits:08X}; cvt.rn.{dtype}x2.f32 ${at}, p, p;"
    return text + "}"


_E2M1_BFLOAT16: tl.constexpr = tl.constexpr(_e2m1("bf16"))
_E2M1_FLOAT16: tl.constexpr = tl.constexpr(_e2m1("f16"))
_SIXTEEN: tl.constexpr = tl.constexpr("=h," * 16 + "l,r")
_TWO_BFLOAT16: tl.constexpr = tl.constexpr(_factors("bf16", 2))
_TWO_FLOAT16: tl.constexpr = tl.constexpr(_factors("f16", 2))
_FOUR_BFLOAT16: tl.constexpr = tl.constexpr(_factors("bf16", 4))
_FOUR_FLOAT16: tl.constexpr = tl.constexpr(_factors("f16", 4))


@triton.jit
def two_factors(word, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """[..., 2]: what `e2m1_values` takes, for the two lower E4M3 bytes of int32 words."""
    if HARDWARE:
        TEXT: tl.constexpr = _TWO_FLOAT16 if tl.float16 == DTYPE else _TWO_BFLOAT16
        f = tl.inline_asm_elementwise(TEXT, "=r,=r,r", [word], dtype=(tl.int32,) * 2, is_pure=True, pack=1)
        return tl.join(f[0], f[1])
    else:
        return tl.join(e4m3_value(word & 255), e4m3_value((word >> 8) & 255))


@triton.jit
def four_factors(word, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """[..., 2, 2]: the same for the four bytes of int32 words; the last index is byte 0 or 1 of a half."""
    if HARDWARE:
        TEXT: tl.constexpr = _FOUR_FLOAT16 if tl.float16 == DTYPE else _FOUR_BFLOAT16
        f = tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r", [word], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        return tl.join(tl.join(f[0], f[2]), tl.join(f[1], f[3]))
    else:
        low = tl.join(e4m3_value(word & 255), e4m3_value((word >> 16) & 255))
        return tl.join(low, tl.join(e4m3_value((word >> 8) & 255), e4m3_value((word >> 24) & 255)))


@triton.jit
def _nibble(codes, at: tl.constexpr, factor, DTYPE: tl.constexpr):
    code = ((codes >> (4 * at)) & 15).to(tl.int32)
    return narrow(e2m1_value(code) * factor * SMALLER, DTYPE, False)


@triton.jit
def e2m1_values(codes, factor, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """[..., 2, 2, 2, 2] values of int64 words, times blocks' scales, times `SMALLER`; the last index is the half."""
    if HARDWARE:
        if tl.float16 == DTYPE:
            e = tl.inline_asm_elementwise(
                _E2M1_FLOAT16, _SIXTEEN, [codes, factor], dtype=(tl.float16,) * 16, is_pure=True, pack=1
            )
        else:
            e = tl.inline_asm_elementwise(
                _E2M1_BFLOAT16, _SIXTEEN, [codes, factor], dtype=(tl.bfloat16,) * 16, is_pure=True, pack=1
            )
        low = _eight(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7])
        return tl.join(low, _eight(e[8], e[9], e[10], e[11], e[12], e[13], e[14], e[15]))
    low = _eight(
        _nibble(codes, 0, factor, DTYPE),
        _nibble(codes, 4, factor, DTYPE),
        _nibble(codes, 1, factor, DTYPE),
        _nibble(codes, 5, factor, DTYPE),
        _nibble(codes, 2, factor, DTYPE),
        _nibble(codes, 6, factor, DTYPE),
        _nibble(codes, 3, factor, DTYPE),
        _nibble(codes, 7, factor, DTYPE),
    )
    high = _eight(
        _nibble(codes, 8, factor, DTYPE),
        _nibble(codes, 12, factor, DTYPE),
        _nibble(codes, 9, factor, DTYPE),
        _nibble(codes, 13, factor, DTYPE),
        _nibble(codes, 10, factor, DTYPE),
        _nibble(codes, 14, factor, DTYPE),
        _nibble(codes, 11, factor, DTYPE),
        _nibble(codes, 15, factor, DTYPE),
    )
    return tl.join(low, high)
