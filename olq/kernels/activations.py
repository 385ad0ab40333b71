"""Activations to FP8 in groups of columns, with the gated product on the way if there is one. Imports triton.

Letters as in `fp8`; unit = a group, lane = a column of it. Rows from n up to `down` have no source: they get scale 1.0
or words 0, which is the padding of column-major scales. Arithmetic is that of olq.numerics.activations and
olq.numerics.silu, operation by operation.
"""

import triton
import triton.language as tl

from olq.kernels.memory import finish, half, read, write
from olq.kernels.rounding import e4m3, fp8_scale, largest


@triton.jit
def _share(numerator, scale, p, power, HARDWARE: tl.constexpr):
    """numerator * scale / (p * power + 1), IEEE: numerator and p 0.7 to 1.5, powers of two that make e <= 1 of p.

    A quotient of normal size has the same digits whatever power of two it has, so that dividing needs no look for
    extremes: a reciprocal, refined once, and two corrections of the quotient, as the compiler's own division does it.
    """
    if HARDWARE:
        divisor = tl.fma(p, power, 1.0)  # the product is exact
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
        r = tl.fma(tl.fma(-divisor, r, 1.0), r, r)
        q = numerator * r
        q = tl.fma(tl.fma(-divisor, q, numerator), r, q)
        q = tl.fma(tl.fma(-divisor, q, numerator), r, q)
        return q * scale
    return tl.div_rn(numerator * scale, p * power + 1.0)


@triton.jit
def _silu_mul(
    g,
    u,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    ADDS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """y of olq.numerics.silu, whose letters and constants these are. LIMIT 0.0: none. ADDS: beta is not 0."""
    if LIMIT != 0.0:
        g = tl.where(g > LIMIT, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    t = g if ALPHA == 1.0 else g * ALPHA
    a = tl.abs(t)
    if HARDWARE:  # noqa: SIM108  # of constants: only one of the two is compiled
        a = tl.minimum(a, 87.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        a = tl.where(a > 87.0, 87.0, a)
    steps = a * 1.4426950216293335 + 12582912.0  # 1.5 * 2**23, where float32 are 1 apart
    power = ((0x4B400000 + 127 - steps.to(tl.int32, bitcast=True)) << 23).to(tl.float32, bitcast=True)
    k = steps - 12582912.0
    if HARDWARE:  # noqa: SIM108
        s = tl.fma(k, 0.693359375, -a)  # exact, as the product is
    else:
        s = k * 0.693359375 - a
    s = s + k * -0.00021219444170128554
    p = s * 0.001386491465382278 + 0.008367590606212616
    p = p * s + 0.04166722670197487
    p = p * s + 0.16666533052921295
    p = p * s + 0.5
    p = p * s + 1.0
    p = p * s + 1.0
    positive = t >= 0.0
    numerator = tl.where(positive, 1.0, p)
    sigmoid = _share(numerator, tl.where(positive, 1.0, power), p, power, HARDWARE)
    sigmoid = tl.where(t < -87.0, 0.0, sigmoid)
    if ADDS:
        u = u + BETA
    return (g * sigmoid) * u


@triton.jit
def _offsets(rows, columns, row_stride, column_stride, WIDE: tl.constexpr):
    """[R, U, L] offsets of a tile from its first element, for `columns` [1, U, L]. WIDE: in 64 bits."""
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows[:, None, None] * row_stride + columns * column_stride


@triton.jit
def _values(
    source,
    rows,
    columns,
    row_stride,
    column_stride,
    mask,
    HALF: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A tile [R, U, L] in float32. HALF: every second element of a 16-bit type, as `plan_activations.half_of` has it.

    Such elements are halves of words, which are read whole: as elements they would be too far apart to be read many at
    a time.
    """
    if HALF == -1:
        at = source + _offsets(rows, columns, row_stride, column_stride, WIDE)
        return read(at, mask, FULL, "", 0.0, HARDWARE)
    words = tl.multiple_of((source - HALF).to(tl.pointer_type(tl.int32)), 16)
    at = words + _offsets(rows, columns, row_stride // 2, 1, WIDE)
    word = tl.load(at) if FULL else tl.load(at, mask=mask, other=0)
    return half(word, HALF, source.dtype.element_ty == tl.bfloat16)


@triton.jit
def quantize_groups(
    source,
    up,
    codes,
    scale,
    n,
    down,
    k,
    source_batch,
    source_row,
    source_column,
    up_batch,
    up_row,
    up_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_row,
    scale_column,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    ADDS: tl.constexpr,
    THROUGH: tl.constexpr,
    POWER: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    SOURCE_HALF: tl.constexpr,
    UP_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One scale for each GROUP columns of a row, which LANES hold; a program does ROWS x UNITS of them.

    GATED: of the product of `source`, the gate, and `up`, rounded to THROUGH; else of `source`. WORDS: scales are
    exponents, four to an int32, 0 where there is no unit.
    """
    batch = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    tile = tl.program_id(0)
    first_column = tile.to(tl.int64) * (UNITS * GROUP)
    left = k - first_column
    rows = tl.arange(0, ROWS)
    units = tl.arange(0, UNITS)
    lanes = tl.arange(0, LANES)[None, None, :]
    columns = (units * GROUP)[None, :, None] + lanes
    inside = (first_row + rows < n)[:, None]
    mask = inside[:, :, None] & (columns < left)
    if LANES != GROUP:
        mask = mask & (lanes < GROUP)

    source += batch * source_batch + first_row * source_row + first_column * source_column
    y = _values(source, rows, columns, source_row, source_column, mask, SOURCE_HALF, FULL, WIDE, HARDWARE)
    if GATED:
        up += batch * up_batch + first_row * up_row + first_column * up_column
        u = _values(up, rows, columns, up_row, up_column, mask, UP_HALF, FULL, WIDE, HARDWARE)
        y = _silu_mul(y, u, LIMIT, ALPHA, BETA, ADDS, HARDWARE)
        y = finish(y, THROUGH, 0.0, HARDWARE)
    unit_scale, factor = fp8_scale(largest(y, 2, HARDWARE), POWER, HARDWARE)
    y = tl.where((factor != 0.0)[:, :, None], y * factor[:, :, None], 0.0)
    codes += batch * codes_batch + first_row * codes_row + first_column * codes_column
    write(codes + _offsets(rows, columns, codes_row, codes_column, WIDE), e4m3(y, HARDWARE), mask, FULL)

    to = (first_row + rows)[:, None] * scale_row
    held = (first_row + rows < down)[:, None]
    scale += batch * scale_batch
    if WORDS:
        byte = tl.where(
            inside & (units * GROUP < left)[None, :], unit_scale.to(tl.int32, bitcast=True) >> 23, 0
        )
        four = tl.reshape(byte, (ROWS, UNITS // 4, 4)) << (tl.arange(0, 4) * 8)[None, None, :]
        words = tile.to(tl.int64) * (UNITS // 4) + tl.arange(0, UNITS // 4)
        within = held & (tl.arange(0, UNITS // 4) * (4 * GROUP) < left)[None, :]
        write(scale + to + words[None, :] * scale_column, tl.sum(four, 2), within, FULL)
    else:
        at = scale + to + (tile.to(tl.int64) * UNITS + units)[None, :] * scale_column
        write(at, unit_scale, held & (units * GROUP < left)[None, :], FULL)
