"""Products of some tens of rows of x with a quantized weight, and the sums of their shares. Imports triton.

Letters, scales, EVEN and EARLY as in `linear_small`; the order of codes as in `linear_weights`.

Program   WARPS x 16 rows of the weight times TOKENS tokens times one of SHARES shares of the columns, which it walks in
          STEPS steps of COLUMNS. x goes through shared memory, once a program and step, and decoded weights do not: on
          compute capability 9.x that is what its tensor cores can take, and they read x for all warps. So x moves less
          often than in `linear_small`, where each warp reads it.
Shares    a program that had all columns would need half of a multiprocessor's threads to itself, or few rows and x more
          often. Each program writes the sum of its columns, scaled, in float32: [SHARES, m, columns of the result];
          `add` adds them, in order, with the bias. One share needs neither. Each has columns: where there are none, an
          infinite scale would make a NaN of their zero.
DENSE     columns of x are next to each other. Where they are not, x is read in the order of the weights at once: Triton
          3.6 can't bring what it reads in another order there.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from olq.kernels.linear_decode import add_product, narrow
from olq.kernels.linear_weights import ask, kept, read_scales, scaled_sum, scales_of, weights, words_of


@triton.jit
def _rows_of_w(w, WARPS: tl.constexpr, COLUMNS: tl.constexpr):
    """w' [16 WARPS, COLUMNS] from `weights`."""
    w = tl.permute(w, (4, 3, 5, 2, 7, 6, 1, 8, 9, 0, 10))
    return tl.reshape(w, (16 * WARPS, COLUMNS))


@triton.jit
def _columns_of_x(tile, E2M1: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """x [COLUMNS, TOKENS] in the order of the weights, from [TOKENS, COLUMNS] as it lies in memory."""
    if E2M1:
        y = tl.reshape(tile, (TOKENS, GROUPS, 4, PAIRS, 2, 2, 2, 2, 2))
        y = tl.permute(y, (0, 1, 3, 4, 5, 7, 8, 2, 6))
    else:
        y = tl.reshape(tile, (TOKENS, GROUPS, 4, PAIRS, 2, 2, 2, 2))
        y = tl.permute(y, (0, 1, 3, 4, 5, 6, 2, 7))
    return tl.trans(tl.reshape(y, (TOKENS, GROUPS * PAIRS * (128 if E2M1 else 64))))


@triton.jit
def _column(c, E2M1: tl.constexpr, PAIRS: tl.constexpr):
    """Where column `c` in the order of the weights lies, within a step."""
    WORD: tl.constexpr = 16 if E2M1 else 8  # codes
    CHUNK: tl.constexpr = 8 * WORD
    group, pair, t = c // (CHUNK * PAIRS), c // CHUNK % PAIRS, c // 2 % 4
    at = (group * 4 + t) * (2 * WORD * PAIRS) + pair * (2 * WORD) + c // (4 * WORD) % 2 * WORD
    if E2M1:
        return at + c // 32 % 2 * 8 + c % 2 * 4 + c // 16 % 2 * 2 + c // 8 % 2
    else:
        return at + c // 16 % 2 * 4 + c // 8 % 2 * 2 + c % 2


@triton.jit(do_not_specialize=["scale_column"])
def product(
    x,
    codes,
    scale,
    scale_2,
    bias,
    out,
    m,
    n,
    k,
    row,
    column,
    part,
    x_row,
    x_column,
    codes_row,
    scale_start,
    scale_row,
    scale_column,
    unit_rows,
    out_row,
    out_share,
    E2M1: tl.constexpr,
    SCALES: tl.constexpr,
    SWIZZLED: tl.constexpr,
    WORDS: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT_STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`out` is the result, or float32 of the shares. `scale_column` as in `linear_small.product`."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    CODES: tl.constexpr = 16 if E2M1 else 8  # a word
    STRIP: tl.constexpr = GROUPS * PAIRS * 8  # words of a row and step
    COLUMNS: tl.constexpr = STRIP * CODES
    ROWS: tl.constexpr = 16 * WARPS
    ROWED: tl.constexpr = (SCALES == "e8m0") or E2M1  # scales stand in w'
    band = tl.program_id(0) // SHARES * ROWS
    first = tl.program_id(0) % SHARES * STEPS  # step of the whole walk
    rows, word = words_of(row, band, n, 1, WARPS, 16, PAIRS, GROUPS, STEPS)
    word += first * STRIP
    from_ = codes.to(tl.pointer_type(tl.int64)) + (rows.to(tl.int64) * (codes_row // 8) + word)
    some = rows >= 0  # always; a mask has to have the pointers' shape

    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if DENSE:  # [TOKENS, COLUMNS], as it lies in memory
        x_at = first * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x_token = tl.minimum(tokens, m - 1)[:, None]
    else:  # [COLUMNS, TOKENS] in the order of the weights: no read takes neighbouring columns
        x_at = first * COLUMNS + _column(tl.arange(0, COLUMNS), E2M1, PAIRS)[:, None]
        x_token = tl.minimum(tokens, m - 1)[None, :]
    x_from = x + (x_token.to(tl.int64) * x_row + x_at * x_column)
    x_some = x_token >= 0

    if ROWED:
        SSTEP: tl.constexpr = COLUMNS // (16 if E2M1 else 32)
        s_from, s_left, s_some, s_stride = scales_of(
            scale, row, band, n, k, first, scale_row, scale_column, E2M1, SWIZZLED, 1, WARPS, 16, PAIRS, GROUPS, STEPS
        )  # fmt: skip
    local = band + tl.arange(0, ROWS)
    if SCALES == "units":
        u_scale = (
            scale + scale_start + ((row + tl.minimum(local, n - 1)) // unit_rows).to(tl.int64) * scale_row
        )
    if EARLY:
        width = (k + CODES // 8 - 1) // (CODES // 8) - first * (STRIP * 8)
        ask(codes + first * (STRIP * 8), codes_row, row, band, n, width, STRIP * 8, STEPS, 1, WARPS, 16)
        gdc_wait()

    if EVEN:
        code = tl.load(from_, eviction_policy="evict_first")
        tile = tl.load(x_from)
    else:
        code = tl.load(from_, mask=(word * CODES < k) & some, other=0, eviction_policy="evict_first")
        tile = tl.load(x_from, mask=(x_at < k) & x_some, other=0)
    scales = 0
    if ROWED:
        scales = read_scales(s_from, s_left, s_some, scale_column, E2M1, WORDS, EVEN)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        current, x_tile, s_current = code, tile, scales
        if not EVEN:
            current = kept(current, k - (word + step * STRIP) * CODES, CODES)
        # The next step's. After the last one it is read again: a mask takes instructions.
        following = tl.minimum(step + 1, STEPS - 1)
        if EVEN:
            code = tl.load(from_ + following * STRIP, eviction_policy="evict_first")
            tile = tl.load(x_from + following * (COLUMNS * x_column))
        else:
            mask = ((word + following * STRIP) * CODES < k) & some
            code = tl.load(from_ + following * STRIP, mask=mask, other=0, eviction_policy="evict_first")
            mask = (x_at + following * COLUMNS < k) & x_some
            tile = tl.load(x_from + following * (COLUMNS * x_column), mask=mask, other=0)
        if ROWED:
            left = s_left - following * SSTEP
            scales = read_scales(s_from + following * s_stride, left, s_some, scale_column, E2M1, WORDS, EVEN)
        # x first, so that its way through shared memory begins before the weights are decoded.
        y = _columns_of_x(x_tile, E2M1, TOKENS, PAIRS, GROUPS) if DENSE else x_tile
        w = weights(current, s_current, E2M1, SCALES, DTYPE, WARPS, 16, PAIRS, GROUPS, HARDWARE)
        w = _rows_of_w(w, WARPS, COLUMNS)
        if SCALES == "units":
            unit, last = (first + step) // UNIT_STEPS, (k - 1) // (UNIT_STEPS * COLUMNS)
            u = tl.load(u_scale + tl.minimum(unit, last) * scale_column)
            u = tl.where(unit <= last, u, 0.0)  # zeros times an infinity would be NaN
            total += add_product(tl.zeros((ROWS, TOKENS), tl.float32), w, y) * u[:, None]
        else:
            total = add_product(total, w, y)
    if EARLY:
        gdc_launch_dependents()

    total = scaled_sum(
        total, scale, scale_2, part, row, local, n, scale_start, scale_row, unit_rows, E2M1, SCALES
    )
    to = out + tokens.to(tl.int64)[None, :] * out_row + (column + local)[:, None]
    mask = (tokens < m)[None, :] & (local < n)[:, None]
    if SHARES == 1:
        if BIAS:
            total += tl.load(bias + column + local, mask=local < n, other=0.0).to(tl.float32)[:, None]
        tl.store(to, narrow(total, out.dtype.element_ty, HARDWARE), mask=mask)
    else:
        tl.store(to + (tl.program_id(0) % SHARES).to(tl.int64) * out_share, total, mask=mask)


@triton.jit
def add(
    shares,
    bias,
    out,
    n,
    out_row,
    out_share,
    BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of the result, BLOCK of its `n` columns: the sum of what `product` left, and the bias."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    mask = columns < n
    from_ = shares + token * n + columns
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(from_, mask=mask, other=0.0)
    for _ in tl.static_range(1, SHARES):
        from_ += out_share
        total += tl.load(from_, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + columns, narrow(total, out.dtype.element_ty, HARDWARE), mask=mask)
