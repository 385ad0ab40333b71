"""Device functions: float32 to codes and back, and a unit's largest magnitude to its scale. Imports triton.

Every function repeats, operation by operation, the steps of olq.numerics.rounding and olq.numerics.scales.
HARDWARE  the GPU's own conversions (compute capability 8.9 and later). Without it the same bytes come from integer
          steps: for older GPUs, and for Triton's interpreter, whose conversion to E4M3 rounds ties away from zero.

Kernels here are compiled without fusing products and sums (`olq.kernels.launching`), and divide by `div_rn`:
Triton's `/` is an approximation.
"""

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, AXIS: tl.constexpr, HARDWARE: tl.constexpr):
    """Largest |x| along an axis, float32: NaN if there is one, else infinity if there is one."""
    if HARDWARE:
        return tl.reduce(tl.abs(x), AXIS, _larger)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def larger(a, b, HARDWARE: tl.constexpr):
    """The larger of two magnitudes; NaN wins."""
    if HARDWARE:
        return _larger(a, b)
    return tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def finite(amax):
    """Whether a magnitude is neither infinite nor NaN."""
    return amax.to(tl.int32, bitcast=True) < 0x7F800000


@triton.jit
def e4m3(y, HARDWARE: tl.constexpr):
    """E4M3 codes, uint8, of float32 without NaN: to nearest, ties to even, saturating, sign of zero kept."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    a = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are 2**-9 apart, as float32 are from 1.5 * 2**14 on: one addition rounds.
    small = (a.to(tl.float32, bitcast=True) + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    return (tl.where(a < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """Float32 values of E4M3 codes (uint8): exact, NaN for 0x7F and 0xFF."""
    bits = code.to(tl.int32)
    a = bits & 0x7F
    # In float32's fields the code is 2**-120 of its value, subnormals included; the product is exact.
    magnitude = (a << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)
    return tl.where(a == 0x7F, 0x7FC00000, value).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code):
    """Float32 values of E2M1 codes (int32, 0 .. 15), exact."""
    # In float32's fields the code is 2**-126 of its value; a product of two powers stays in range.
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (magnitude.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x, HARDWARE: tl.constexpr):
    """1 / x, IEEE. HARDWARE: the instruction for it, cheaper than a division of 1."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _e2m1(x, factor, keep):
    """The steps of olq.numerics.rounding: 1.5 * 2**23 and more, where float32 are 1 apart, makes each sum round."""
    a = tl.where(keep == 0, 0.0, tl.abs(x) * factor)
    steps = tl.minimum(a * 2.0 + 12582912.0, a + 12582914.0)
    steps = tl.minimum(tl.minimum(steps, a * 0.5 + 12582916.0), 12582919.0)
    return (steps.to(tl.int32, bitcast=True) & 7) | ((x.to(tl.int32, bitcast=True) >> 28) & keep & 8)


def _code(x: str, factor: str, to: str) -> str:
    return f"""
    abs.f32 a, {x};
    mul.rn.f32 a, a, {factor};
    mul.rn.sat.f32 p, a, 0f3F000000;
    fma.rn.f32 s, p, 0f40800000, 0f4B400000;
    fma.rn.sat.f32 p, a, 0f3F000000, 0fBF800000;
    fma.rn.f32 s, p, 0f40000000, s;
    fma.rn.sat.f32 p, a, 0f3F000000, 0fC0000000;
    add.rn.f32 s, p, s;
    mov.b32 {to}, s;"""


def _signs(first: int, to: str) -> str:
    moves = "".join(f"mov.b32 w{i}, ${first + i}; " for i in range(4))
    return f"""
    {moves}
    prmt.b32 w0, w0, w1, 0x0073;
    prmt.b32 w2, w2, w3, 0x0073;
    prmt.b32 {to}, w0, w2, 0x5410;"""


# Operands: $1 .. $4 low, $5 .. $8 high, $9 .. $12 factors, $13 four bytes of `keep`.
_PAIRS: tl.constexpr = tl.constexpr(
    "{ .reg .f32 a, p, s; .reg .b32 u0, u1, u2, u3, v, w0, w1, w2, w3, e, o;"
    + "".join(
        _code(f"${1 + i}", f"${9 + i}", f"u{i}")
        + _code(f"${5 + i}", f"${9 + i}", "v")
        + f" mad.lo.u32 u{i}, v, 16, u{i};"
        for i in range(4)
    )
    + """
    prmt.b32 u0, u0, u1, 0x0040;
    prmt.b32 u2, u2, u3, 0x0040;
    prmt.b32 u0, u0, u2, 0x5410;"""
    + _signs(1, "e")
    + _signs(5, "o")
    + """
    shr.u32 e, e, 4;
    lop3.b32 u0, e, 0x08080808, u0, 0xEA;
    lop3.b32 u0, o, 0x80808080, u0, 0xEA;
    and.b32 $0, u0, $13;
    }"""
)
_PAIRS_OPERANDS: tl.constexpr = tl.constexpr("=r," + "f," * 12 + "r")


@triton.jit
def e2m1_pairs(low, high, factor, keep, HARDWARE: tl.constexpr):
    """E2M1 codes of low * factor and high * factor in a byte, uint8: to nearest, ties to even, saturating, sign kept.

    A code counts steps: four of 1/2 up to 2, two of 1 up to 4, one of 2 up to 6. HARDWARE adds three saturated ramps to
    1.5 * 2**23, where float32 are 1 apart, so that each sum rounds; what is there already is even when the next ramp
    begins, so ties stay even. Saturation, to 0 .. 1, costs nothing there, and turns NaN into 0. Four bytes at a time,
    signs by moving bytes: a GPU before Blackwell has no conversion to E2M1, and arithmetic is what limits NVFP4.

    Args:
        low: float32.
        high: float32.
        factor: float32, 0 where `keep` is 0.
        keep: uint8: 255, or 0 for codes 0 whatever the elements are.
    """
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _PAIRS, _PAIRS_OPERANDS, [low, high, factor, keep], dtype=tl.uint8, is_pure=True, pack=4
        )
    keep = keep.to(tl.int32)
    return (_e2m1(low, factor, keep) | (_e2m1(high, factor, keep) << 4)).to(tl.uint8)


@triton.jit
def power_of_two(byte):
    """E8M0 bytes (int32) to float32 decode scales: 2**(byte - 127), subnormal for 0, NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_scale(amax, CARRY: tl.constexpr):
    """(byte as int32, encode factor) of a block: 255 and 0 if it is not finite."""
    # The 8 of 448 = 1.75 * 2**8 is subtracted before the shift. After it, LLVM narrows the subtraction to pairs of 16
    # bits, and ptxas of CUDA 12.8 loses the constant in some of them (seen: bytes too large by 8, sm90).
    field = (amax.to(tl.int32, bitcast=True) + (CARRY - (8 << 23))) >> 23
    byte = tl.minimum(tl.maximum(field, 0), 253)
    good = finite(amax)
    factor = tl.where(good, (254 - byte) << 23, 0).to(tl.float32, bitcast=True)
    return tl.where(good, byte, 255), factor


@triton.jit
def fp8_scale(amax, POWER: tl.constexpr, HARDWARE: tl.constexpr):
    """(decode scale, encode factor) of a unit: NaN and 0 if it is not finite, 1 for zeros."""
    bits = amax.to(tl.int32, bitcast=True)
    if POWER:
        field = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
        field = tl.where(bits == 0, 127, field)
        scale = (field << 23).to(tl.float32, bitcast=True)
        factor = ((254 - field) << 23).to(tl.float32, bitcast=True)
    else:
        divisor = tl.full(amax.shape, 448.0, tl.float32)
        scale = tl.maximum(tl.div_rn(amax, divisor), 1.1754943508222875e-38)
        scale = tl.where(bits == 0, 1.0, scale)
        factor = reciprocal(scale, HARDWARE)
    good = bits < 0x7F800000
    nan = tl.full(amax.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(good, scale, nan), tl.where(good, factor, 0.0)


@triton.jit
def nvfp4_tensor_scale(amax):
    """s2 = amax / 2688, not below 2**-117; 1 for zeros, NaN if it is not finite."""
    bits = amax.to(tl.int32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 2688.0, tl.float32)), 6.018531076210112e-36)
    scale = tl.where(bits == 0, 1.0, scale)
    nan = tl.full(amax.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, nan)


@triton.jit
def _quotient(a, divisor):
    """a / divisor, IEEE wherever it is above 2**-11, for a divisor of 2**-60 to 2**100: by its reciprocal.

    The second correction of a quotient that is within one unit of the last place rounds as division does (Markstein).
    A quotient beyond float32 may become NaN. Half of what a division costs, which has to look for every extreme.
    """
    r = reciprocal(divisor + tl.zeros(a.shape, tl.float32), True)
    d = divisor + tl.zeros(a.shape, tl.float32)
    q = a * r
    q = tl.fma(tl.fma(-q, d, a), r, q)
    return tl.fma(tl.fma(-q, d, a), r, q)


@triton.jit
def nvfp4_block_scale(amax, scale_2, HARDWARE: tl.constexpr):
    """(SF code uint8, encode factor, `keep` of `e2m1_pairs`) of blocks, given their tensor's scale, a scalar."""
    if not HARDWARE:
        scale_2 += tl.zeros(amax.shape, tl.float32)
    good = finite(amax) & ((scale_2 > 0.0) & (scale_2 < float("inf")))
    divisor = scale_2 * 6.0
    if HARDWARE:
        if (divisor > 8.673617379884035e-19) & (divisor < 1.2676506002282294e30):
            ratio = _quotient(amax, divisor)
        else:
            ratio = tl.div_rn(amax, divisor + tl.zeros(amax.shape, tl.float32))
        ratio = tl.minimum(ratio, 448.0)  # of NaN: 448
    else:
        ratio = tl.minimum(tl.div_rn(tl.where(good, amax, 0.0), tl.where(good, divisor, 1.0)), 448.0)
    code = e4m3(ratio, HARDWARE)
    # No sign, no NaN: in float32's fields the code is 2**-120 of its value.
    value = (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    factor = reciprocal(value * scale_2, HARDWARE)
    factor = tl.where(good & finite(factor), factor, 0.0)
    return tl.where(good, code, 0x7F).to(tl.uint8), factor, tl.where(good, 255, 0).to(tl.uint8)
