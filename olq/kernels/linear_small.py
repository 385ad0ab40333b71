"""Products of a few rows of x with a quantized weight: what limits them is reading the weight once. Imports triton.

Letters   m = rows of x (tokens); n, k = rows and columns of the weight's part; row, column = the part's first row in
          the kernel format, and in the result. *_row, *_column = strides in elements.
Program   BANDS x ROWS rows of the weight times TOKENS tokens; for those beyond m the last is read again, or nothing
          (MASKED, where x is not asked for ahead). A warp has one band and one of SPLITS shares of the columns: it
          walks STEPS tiles of COLUMNS, in the order of `linear_weights`. The sums of all shares are added at the end,
          always in one order.
Ahead     codes are asked for AHEAD steps before they are multiplied, scales in w' one step, x XAHEAD steps. What is
          asked for waits where it is moved to another register: UNROLL steps of a loop's body move nothing between.
Caches    codes are what a cache may lose first; without that they push x out of L1.
EVEN      whole tiles hold k columns exactly.
EARLY     the kernel may start before the one in front of it is done: it asks for its first codes to be in the cache,
          which is no reading; then it waits, and lets the next one start likewise.

Scales    where they stand; w' is what is multiplied
    whole   of whole rows (channels, parts): on the sum, and w' is the code's value
    units   float32 for unit_rows rows and UNIT_STEPS steps: on the sum of each step; here with X8 only
    e8m0    in w'
    e4m3    in w', which is smaller than w by scale_2 and by `linear_decode.SMALLER`: these are for the sum
x         bfloat16 or float16, w' likewise; or X8, E4M3 codes, which become float16 as w' does. Their scales, of tokens
          or of tokens and UNIT_STEPS, are for the sum too.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from olq.kernels.linear_decode import add_product, e4m3_values, narrow
from olq.kernels.linear_weights import (
    ask,
    kept,
    read_scales,
    scaled,
    scales_of,
    scales_of_sum,
    weights,
    words_of,
)


@triton.jit
def _columns_of_x(
    tile, E2M1: tl.constexpr, X8: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """x [WARPS, COLUMNS, TOKENS], in the order of the weights, from what a step reads of it."""
    EIGHTS: tl.constexpr = TOKENS // 8
    CHUNKS: tl.constexpr = GROUPS * PAIRS * (4 if E2M1 else 2)
    if X8:  # words [t w, token, warp, eights of tokens, pair, group]
        y = tl.reshape(e4m3_values(tile, tl.float16, HARDWARE), (4, 2, 8, WARPS, EIGHTS, PAIRS, GROUPS, 2, 4))
        y = tl.permute(y, (3, 6, 5, 1, 7, 0, 8, 4, 2))
    elif E2M1:  # elements [t (half, six of eight), token, warp, eights of tokens, chunk]
        y = tl.reshape(tile, (4, 2, 2, 2, 8, WARPS, EIGHTS, CHUNKS))
        y = tl.permute(y, (5, 7, 2, 0, 3, 1, 6, 4))
    else:
        y = tl.reshape(tile, (4, 2, 4, 8, WARPS, EIGHTS, CHUNKS))
        y = tl.permute(y, (4, 6, 1, 0, 2, 5, 3))
    return tl.reshape(y, (WARPS, CHUNKS * 32, TOKENS))


@triton.jit
def _rows_of_w(w, WARPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """w' [WARPS, ROWS, COLUMNS] from `weights`."""
    w = tl.permute(w, (3, 4, 5, 2, 7, 6, 1, 8, 0, 9, 10))
    return tl.reshape(w, (WARPS, ROWS, COLUMNS))


@triton.jit(do_not_specialize=["scale_column"])
def product(
    x,
    x_scale,
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
    x_scale_row,
    x_scale_column,
    codes_row,
    scale_start,
    scale_row,
    scale_column,
    unit_rows,
    out_row,
    E2M1: tl.constexpr,
    SCALES: tl.constexpr,
    SWIZZLED: tl.constexpr,
    WORDS: tl.constexpr,
    X8: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BANDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT_STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    XAHEAD: tl.constexpr,
    MASKED: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`scale_column` is not specialized where it is 1: the compiler shall not read the scales of threads together."""
    tl.static_assert(not (MASKED and XAHEAD), "x that is asked for ahead is read for all tokens")
    DTYPE: tl.constexpr = tl.float16 if X8 else x.dtype.element_ty
    WARPS: tl.constexpr = SPLITS * BANDS
    CODES: tl.constexpr = 16 if E2M1 else 8  # a word
    STRIP: tl.constexpr = GROUPS * PAIRS * 8  # words of a row and step
    COLUMNS: tl.constexpr = STRIP * CODES
    ROWED: tl.constexpr = (SCALES == "e8m0") or E2M1  # scales stand in w'
    band = tl.program_id(0) * (BANDS * ROWS)
    rows, word = words_of(row, band, n, SPLITS, BANDS, ROWS, PAIRS, GROUPS, STEPS, PAIRS)
    from_ = codes.to(tl.pointer_type(tl.int64)) + (rows.to(tl.int64) * (codes_row // 8) + word)
    some = rows >= 0  # always; a mask has to have the pointers' shape

    if X8:  # words [t w, token, warp, eights of tokens, pair, group]
        token = tl.arange(0, 8)[None, :, None, None, None, None]
        token += tl.arange(0, TOKENS // 8)[None, None, None, :, None, None] * 8
        xt_w = tl.arange(0, 8)[:, None, None, None, None, None]
        x_at = ((tl.arange(0, GROUPS) * 4 + xt_w // 2) * PAIRS) * 2 + xt_w % 2
        x_at += tl.arange(0, PAIRS)[None, None, None, None, :, None] * 2
        x_at += (tl.arange(0, WARPS) // BANDS)[None, None, :, None, None, None] * (STEPS * STRIP)
        x_from = x.to(tl.pointer_type(tl.int64))
        XSTEP: tl.constexpr = STRIP
        x_stride, x_apart, XCODES = x_row // 8, 1, 8
    else:  # elements [t c, token, warp, eights of tokens, chunk]: c are 8 neighbours
        CHUNKS: tl.constexpr = PAIRS * (4 if E2M1 else 2)  # that lie together
        token = tl.arange(0, 8)[None, :, None, None, None]
        token += tl.arange(0, TOKENS // 8)[None, None, None, :, None] * 8
        t_c = tl.arange(0, 32)[:, None, None, None, None]
        chunk = tl.arange(0, GROUPS * CHUNKS)[None, None, None, None, :]
        x_at = (chunk // CHUNKS * 4 + t_c // 8) * (CHUNKS * 8) + chunk % CHUNKS * 8 + t_c % 8
        x_at += (tl.arange(0, WARPS) // BANDS)[None, None, :, None, None] * (STEPS * COLUMNS)
        x_from = x
        XSTEP: tl.constexpr = COLUMNS
        x_stride, x_apart, XCODES = x_row, x_column, 1
    x_from += tl.minimum(token, m - 1).to(tl.int64) * x_stride + x_at * x_apart
    x_some = (token < m) & (x_at >= 0) if MASKED else token >= 0

    if ROWED:
        SSTEP: tl.constexpr = COLUMNS // (16 if E2M1 else 32)
        COUNT: tl.constexpr = 2 * PAIRS if E2M1 else 1
        s_from, s_left, s_some, s_stride = scales_of(
            scale, row, band, n, k, 0, scale_row, scale_column, E2M1, SWIZZLED, SPLITS, BANDS, ROWS, PAIRS, GROUPS,
            STEPS,
        )  # fmt: skip
    if SCALES == "units":  # [WARPS, ROWS, 1], and of x [WARPS, 1, TOKENS]
        u_first = (tl.arange(0, WARPS) // BANDS * STEPS)[:, None, None]
        u_rows = (
            band + (tl.arange(0, WARPS) % BANDS)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]
        )
        u_rows = row + tl.minimum(u_rows, n - 1)
        u_scale = scale + scale_start + (u_rows // unit_rows).to(tl.int64) * scale_row
        u_some = u_rows >= 0
        u_token = tl.minimum(tl.arange(0, TOKENS)[None, None, :], m - 1)
        ux_scale = x_scale + u_token.to(tl.int64) * x_scale_row
        ux_some = u_token >= 0
    if EARLY:
        width = (k + CODES // 8 - 1) // (CODES // 8)
        ask(codes, codes_row, row, band, n, width, STRIP * 8, STEPS, SPLITS, BANDS, ROWS)
        gdc_wait()
        gdc_launch_dependents()

    if EVEN:
        code = tl.load(from_, eviction_policy="evict_first")
    else:
        code = tl.load(from_, mask=(word * CODES < k) & some, other=0, eviction_policy="evict_first")
    code_2 = code
    if AHEAD == 2:
        more = some & (STEPS > 1)
        mask = more if EVEN else ((word + STRIP) * CODES < k) & more
        code_2 = tl.load(from_ + STRIP, mask=mask, other=0, eviction_policy="evict_first")
    scales = 0
    if ROWED:
        scales = read_scales(s_from, s_left, s_some, scale_column, COUNT, WORDS, EVEN)
    tile = 0
    if XAHEAD:
        tile = tl.load(x_from) if EVEN else tl.load(x_from, mask=(x_at * XCODES < k) & x_some, other=0)
    # Asked for here, these scales are there when the sum is: nvfp4 and one row of x took 2.5 % longer without.
    local = band + tl.arange(0, BANDS * ROWS)
    tokens = tl.arange(0, TOKENS)
    of_sum = scales_of_sum(
        scale, scale_2, part, row, local, n, scale_start, scale_row, unit_rows, E2M1, SCALES
    )
    if X8 and SCALES == "whole":
        of_x = tl.load(x_scale + tl.minimum(tokens, m - 1).to(tl.int64) * x_scale_row)
    total = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        if XAHEAD:
            x_tile = tile
            following = tl.minimum(step + 1, STEPS - 1)  # the last tile again: a mask takes instructions
            if EVEN:
                tile = tl.load(x_from + following * (XSTEP * x_apart))
            else:
                mask = x_some & ((x_at + following * XSTEP) * XCODES < k)
                tile = tl.load(x_from + following * (XSTEP * x_apart), mask=mask, other=0)
        elif EVEN and not MASKED:
            x_tile = tl.load(x_from + step * (XSTEP * x_apart))
        else:
            mask = x_some if EVEN else x_some & ((x_at + step * XSTEP) * XCODES < k)
            x_tile = tl.load(x_from + step * (XSTEP * x_apart), mask=mask, other=0)
        current = code
        if not EVEN:
            current = kept(current, k - (word + step * STRIP) * CODES, CODES)
        # What later steps need is asked for before this one computes.
        code = code_2
        more = some & (step + AHEAD < STEPS)
        mask = more if EVEN else ((word + (step + AHEAD) * STRIP) * CODES < k) & more
        code_2 = tl.load(from_ + (step + AHEAD) * STRIP, mask=mask, other=0, eviction_policy="evict_first")
        if AHEAD == 1:
            code = code_2
        s_current = scales
        if ROWED:
            more = s_some & (step + 1 < STEPS)
            left = s_left - (step + 1) * SSTEP
            scales = read_scales(s_from + (step + 1) * s_stride, left, more, scale_column, COUNT, WORDS, EVEN)
        w = weights(current, s_current, E2M1, SCALES, DTYPE, WARPS, ROWS, PAIRS, GROUPS, HARDWARE)
        w = _rows_of_w(w, WARPS, ROWS, COLUMNS)
        y = _columns_of_x(x_tile, E2M1, X8, WARPS, TOKENS, PAIRS, GROUPS, HARDWARE)
        if SCALES == "units":
            some_of_it = add_product(tl.zeros((WARPS, ROWS, TOKENS), tl.float32), w, y)
            unit = (u_first + step) // UNIT_STEPS
            there = (u_first + step) * COLUMNS < k  # else the sum is zero, and zero times an infinity is NaN
            some_of_it *= tl.load(u_scale + unit * scale_column, mask=there & u_some, other=0.0)
            some_of_it *= tl.load(ux_scale + unit * x_scale_column, mask=there & ux_some, other=0.0)
            total += some_of_it
        else:
            total = add_product(total, w, y)

    total = tl.sum(tl.reshape(total, (SPLITS, BANDS * ROWS, TOKENS)), 0)
    total = scaled(total, of_sum, E2M1, SCALES)
    if X8 and SCALES == "whole":
        total *= of_x[None, :]
    if BIAS:
        total += tl.load(bias + column + local, mask=local < n, other=0.0).to(tl.float32)[:, None]
    to = out + tokens.to(tl.int64)[None, :] * out_row + (column + local)[:, None]
    mask = (tokens < m)[None, :] & (local < n)[:, None]
    tl.store(to, narrow(total, out.dtype.element_ty, HARDWARE), mask=mask)
