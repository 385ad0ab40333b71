"""Device functions: eight or sixteen codes at a time to operands of a matrix product, in registers. Imports triton.

Each value equals what `decode` writes: the same float32 steps, then one rounding to the product's dtype.
HARDWARE  see `rounding`.
"""

import triton
import triton.language as tl

from olq.kernels.launching import interpreted
from olq.kernels.rounding import e2m1_value, e4m3_value

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


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


# -- eight E4M3 codes ---------------------------------------------------------------------------------------


def _eight(dtype: str) -> str:
    """PTX: eight values; $8 are their codes, $9 is the scale."""
    text = "{ .reg .b32 w0, w1, r; .reg .b16 a, b, c, d; .reg .f32 p, q; mov.b64 {w0, w1}, $8;"
    for word in (0, 1):
        text += f"mov.b32 {{c, d}}, w{word};"
        for half, codes in enumerate("cd"):
            at = 4 * word + 2 * half
            text += (
                f"cvt.rn.f16x2.e4m3x2 r, {codes}; mov.b32 {{a, b}}, r; cvt.f32.f16 p, a; cvt.f32.f16 q, b;"
            )
            text += f"mul.rn.f32 p, p, $9; mul.rn.f32 q, q, $9; cvt.rn.{dtype}x2.f32 r, q, p;"
            text += f"mov.b32 {{${at}, ${at + 1}}}, r;"
    return text + "}"


_EIGHT_BFLOAT16: tl.constexpr = tl.constexpr(_eight("bf16"))
_EIGHT_FLOAT16: tl.constexpr = tl.constexpr(_eight("f16"))
_EIGHT_OPERANDS: tl.constexpr = tl.constexpr("=h," * 8 + "l,f")


@triton.jit
def _e4m3(codes, at: tl.constexpr, scale, DTYPE: tl.constexpr):
    return narrow(e4m3_value((codes >> (8 * at)) & 255) * scale, DTYPE, False)


@triton.jit
def e4m3_values(codes, scale, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Eight weights.

    Args:
        codes: int64, eight codes.
        scale: float32.
        DTYPE: bfloat16 or float16.
    """
    if HARDWARE:
        scale += tl.zeros(codes.shape, tl.float32)
    if HARDWARE and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            _EIGHT_FLOAT16, _EIGHT_OPERANDS, [codes, scale], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )
    elif HARDWARE:
        return tl.inline_asm_elementwise(
            _EIGHT_BFLOAT16, _EIGHT_OPERANDS, [codes, scale], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    else:
        return (
            _e4m3(codes, 0, scale, DTYPE),
            _e4m3(codes, 1, scale, DTYPE),
            _e4m3(codes, 2, scale, DTYPE),
            _e4m3(codes, 3, scale, DTYPE),
            _e4m3(codes, 4, scale, DTYPE),
            _e4m3(codes, 5, scale, DTYPE),
            _e4m3(codes, 6, scale, DTYPE),
            _e4m3(codes, 7, scale, DTYPE),
        )


# -- sixteen E2M1 codes -------------------------------------------------------------------------------------

# A block has eight magnitudes: they are worked out once, as 16-bit numbers, and codes choose among them. `prmt` picks
# four bytes by four nibbles of three bits: low bytes and high bytes of four codes. With its fourth bit set a nibble
# repeats the sign of the byte, which leaves a code's sign in bit 0 of a byte of 0x80s. Signs of code and scale meet by
# exclusive or.


def _table(dtype: str) -> str:
    """PTX: t0 .. t3, pairs of magnitudes 0 1/2, 1 3/2, 2 3, 4 6 times the scales; $17 is SF, $18 is s2."""
    text = ""
    pairs = (
        ("00000000", "3F000000"),
        ("3F800000", "3FC00000"),
        ("40000000", "40400000"),
        ("40800000", "40C00000"),
    )
    for i, magnitudes in enumerate(pairs):
        for register, magnitude in zip("pq", magnitudes, strict=True):
            text += f"mul.rn.f32 {register}, $17, 0f{magnitude}; mul.rn.f32 {register}, {register}, $18;"
        text += f"cvt.rn.{dtype}x2.f32 t{i}, q, p;"
    return text


def _block(dtype: str) -> str:
    """PTX: 16 values of a block, those of even columns first; $16 are its codes."""
    text = "{ .reg .f32 p, q; .reg .b32 t0, t1, t2, t3, w0, w1, v, s, z, a, low0, low1, high0, high1, l0, h0, l1, h1;"
    text += _table(dtype)
    text += "prmt.b32 low0, t0, t1, 0x6420; prmt.b32 high0, t0, t1, 0x7531;"
    text += "prmt.b32 low1, t2, t3, 0x6420; prmt.b32 high1, t2, t3, 0x7531;"
    text += "mov.b32 z, 0x80808080; mov.b64 {w0, w1}, $16;"
    for word in (0, 1):
        text += f"shr.u32 v, w{word}, 16;"
        for half, codes in enumerate((f"w{word}", "v")):
            text += f"prmt.b32 s, z, z, {codes}; shl.b32 s, s, 7; and.b32 a, {codes}, 0x7777;"
            text += f"prmt.b32 l{half}, low0, low1, a; prmt.b32 h{half}, high0, high1, a;"
            text += f"lop3.b32 h{half}, s, z, h{half}, 0x6A;"
        for odd, choice in enumerate(("0x6240", "0x7351")):
            for half in (0, 1):
                at = 8 * odd + 4 * word + 2 * half
                text += f"prmt.b32 a, l{half}, h{half}, {choice}; mov.b32 {{${at}, ${at + 1}}}, a;"
    return text + "}"


_BFLOAT16: tl.constexpr = tl.constexpr(_block("bf16"))
_FLOAT16: tl.constexpr = tl.constexpr(_block("f16"))
_OPERANDS: tl.constexpr = tl.constexpr("=h," * 16 + "l,f,f")


@triton.jit
def _e2m1(codes, at: tl.constexpr, sf, s2, DTYPE: tl.constexpr):
    code = ((codes >> (4 * at)) & 15).to(tl.int32)
    return narrow(e2m1_value(code) * sf * s2, DTYPE, False)


@triton.jit
def block_values(codes, sf, s2, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """The 16 weights of each block: 8 of even columns, then 8 of odd ones.

    Args:
        codes: int64, 16 codes.
        sf: float32, the block's scale.
        s2: float32, the tensor's scale, a scalar.
        DTYPE: bfloat16 or float16.
    """
    if HARDWARE:
        s2 += tl.zeros(sf.shape, tl.float32)
    if HARDWARE and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            _FLOAT16, _OPERANDS, [codes, sf, s2], dtype=(tl.float16,) * 16, is_pure=True, pack=1
        )
    elif HARDWARE:
        return tl.inline_asm_elementwise(
            _BFLOAT16, _OPERANDS, [codes, sf, s2], dtype=(tl.bfloat16,) * 16, is_pure=True, pack=1
        )
    else:
        return (
            _e2m1(codes, 0, sf, s2, DTYPE),
            _e2m1(codes, 2, sf, s2, DTYPE),
            _e2m1(codes, 4, sf, s2, DTYPE),
            _e2m1(codes, 6, sf, s2, DTYPE),
            _e2m1(codes, 8, sf, s2, DTYPE),
            _e2m1(codes, 10, sf, s2, DTYPE),
            _e2m1(codes, 12, sf, s2, DTYPE),
            _e2m1(codes, 14, sf, s2, DTYPE),
            _e2m1(codes, 1, sf, s2, DTYPE),
            _e2m1(codes, 3, sf, s2, DTYPE),
            _e2m1(codes, 5, sf, s2, DTYPE),
            _e2m1(codes, 7, sf, s2, DTYPE),
            _e2m1(codes, 9, sf, s2, DTYPE),
            _e2m1(codes, 11, sf, s2, DTYPE),
            _e2m1(codes, 13, sf, s2, DTYPE),
            _e2m1(codes, 15, sf, s2, DTYPE),
        )
