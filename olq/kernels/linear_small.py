"""Products of a few rows of x with a quantized weight: what limits them is reading the weight once. Imports triton.

Letters   m = rows of x (tokens); n, k = rows and columns of the weight's part; row, column = the part's first row in
          the kernel format, and in the result. *_row, *_column = strides in elements.
Program   BANDS x ROWS rows of the weight times TOKENS tokens, M of which differ: all, or one. A warp has one band and
          one of SPLITS shares of the columns: it walks STEPS tiles of COLUMNS. The sums of all shares are added at the
          end, always in one order.
Order     a sum over columns may take them in any order, if both sides do. A thread reads 16 bytes of a row of codes at
          a time, or PAIRS = 2 times as many, and its three neighbours the next ones, GROUPS times; what it decodes is
          just what the tensor cores of Ampere and later want in this thread, so that weights never pass through shared
          memory. x is read in that order too.
Ahead     codes are asked for AHEAD steps before they are multiplied, scales in w' one step, x XAHEAD steps.
EVEN      whole tiles hold k columns exactly.
EARLY     the kernel may start before the one in front of it is done: it asks for its first codes to be in the cache,
          which is no reading; then it waits.

Scales    where they stand; w' is what is multiplied
    whole   of whole rows (channels, parts): on the sum, and w' is the code's value
    units   float32 for unit_rows rows and UNIT_STEPS steps: on the sum of each step
    e8m0    in w'
    e4m3    in w', which is smaller than w by scale_2 and by `linear_decode.SMALLER`: these are for the sum
x         bfloat16 or float16, w' likewise; or X8, E4M3 codes, which become float16 as w' does. Their scales, of tokens
          or of tokens and UNIT_STEPS, are for the sum too.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from olq.kernels.linear_decode import (
    SMALLER,
    add_product,
    e2m1_values,
    e4m3_scaled,
    e4m3_values,
    e8m0_factor,
    four_factors,
    narrow,
    two_factors,
)

_PREFETCH = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }")


@triton.jit
def _places(rows, columns, row_stride, column_stride, SWIZZLED: tl.constexpr):
    """Offsets of scale bytes, given their rows and columns; `row_stride` of swizzled places: the tensor's width."""
    if SWIZZLED:
        tile = rows // 128 * (row_stride // 4) + columns // 4
        return tile.to(tl.int64) * 512 + (rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4)
    return rows.to(tl.int64) * row_stride + columns * column_stride


@triton.jit
def _fetch(
    codes, codes_row, row, n, width, BYTES: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    BANDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Ask for the lines of a program's first step: BYTES a row and share, of the `width` that have codes."""
    LINES: tl.constexpr = (BYTES + 127) // 128
    ALL: tl.constexpr = SPLITS * BANDS * ROWS * LINES
    THREADS: tl.constexpr = SPLITS * BANDS * 32
    line = tl.arange(0, ALL if ALL > THREADS else THREADS)
    rows = tl.program_id(0) * (BANDS * ROWS) + line // LINES % (BANDS * ROWS)
    first = line // (LINES * BANDS * ROWS) * (STEPS * BYTES) + line % LINES * 128
    from_ = codes + ((row + rows).to(tl.int64) * codes_row + first)
    there = (line < ALL) & (rows < n) & (first < width)
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [from_, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _kept(codes, left, CODES: tl.constexpr):
    """Words of which only the first `left` codes are there; the others decode to 0."""
    BITS: tl.constexpr = 64 // CODES
    left = tl.minimum(tl.maximum(left, 0), CODES)
    keep = (tl.full(left.shape, 1, tl.int64) << (tl.minimum(left, CODES - 1) * BITS).to(tl.int64)) - 1
    return tl.where(left == CODES, codes, codes & keep)


@triton.jit
def _scales(
    from_, left, mask, apart, E4M3: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Int32: a thread's E8M0 byte, or its COUNT neighbouring E4M3 bytes, of which those from `left` on are 0.

    `apart` is how far they are apart; WORDS: they are aligned and next to each other.
    """
    if not EVEN:
        mask = mask & (left > 0)
    if not E4M3:
        return tl.load(from_, mask=mask, other=0).to(tl.int32)
    if WORDS:
        TYPE: tl.constexpr = tl.int32 if COUNT == 4 else tl.int16
        word = tl.load(from_.to(tl.pointer_type(TYPE), bitcast=True), mask=mask, other=0).to(tl.int32)
        if not EVEN:
            bytes_ = tl.minimum(left, COUNT)
            keep = (1 << (tl.minimum(bytes_, 3) * 8)) - 1
            word = tl.where(bytes_ == 4, word, word & keep)
        return word
    word = tl.zeros(mask.shape, tl.int32)
    for i in tl.static_range(COUNT):
        word |= tl.load(from_ + i * apart, mask=mask & (left > i), other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def _weights_8(
    codes, scales, SCALES: tl.constexpr, DTYPE: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """w' [WARPS, ROWS, COLUMNS] from words of E4M3 [t w, eights, warp, sixteens, halves, pair, group]."""
    SIXTEENS: tl.constexpr = ROWS // 16
    if SCALES == "e8m0":
        factor = tl.reshape(e8m0_factor(scales, DTYPE, HARDWARE), (4, 1, 8, WARPS, SIXTEENS, 2, 1, GROUPS))
        factor = tl.broadcast_to(factor, (4, 2, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS))
        factor = tl.reshape(factor, (8, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS))
        w = e4m3_scaled(codes, factor, DTYPE, HARDWARE)
    else:
        w = e4m3_values(codes, DTYPE, HARDWARE)
    w = tl.reshape(w, (4, 2, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS, 2, 4))
    w = tl.permute(w, (3, 4, 5, 2, 7, 6, 1, 8, 0, 9))
    return tl.reshape(w, (WARPS, ROWS, GROUPS * PAIRS * 64))


@triton.jit
def _weights_4(
    codes, scales, DTYPE: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The same from words of E2M1, whose scales are [t, eights, warp, sixteens, halves, group]."""
    SIXTEENS: tl.constexpr = ROWS // 16
    if PAIRS == 2:  # [..., group, pair, w]
        factor = tl.permute(four_factors(scales, DTYPE, HARDWARE), (0, 7, 1, 2, 3, 4, 6, 5))
    else:  # [..., group, w]
        factor = tl.permute(two_factors(scales, DTYPE, HARDWARE), (0, 6, 1, 2, 3, 4, 5))
    factor = tl.reshape(factor, (8, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS))
    w = e2m1_values(codes, factor, DTYPE, HARDWARE)
    w = tl.reshape(w, (4, 2, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS, 2, 4, 2))
    w = tl.permute(w, (3, 4, 5, 2, 7, 6, 1, 10, 8, 0, 9))
    return tl.reshape(w, (WARPS, ROWS, GROUPS * PAIRS * 128))


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
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT_STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    XAHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`scale_column` is not specialized where it is 1: the compiler shall not read the scales of threads together."""
    DTYPE: tl.constexpr = tl.float16 if X8 else x.dtype.element_ty
    WARPS: tl.constexpr = SPLITS * BANDS
    CODES: tl.constexpr = 16 if E2M1 else 8  # a word
    STRIP: tl.constexpr = GROUPS * PAIRS * 8  # words of a row and step
    COLUMNS: tl.constexpr = STRIP * CODES
    ROWED: tl.constexpr = (SCALES == "e8m0") or E2M1  # scales stand in w'
    # Words [t w, eights, warp, sixteens, halves, pair, group]: a thread has rows that are 8 apart. Those beyond the
    # last repeat it.
    t_w = tl.arange(0, 8)[:, None, None, None, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None, None, None]
    sixteens = tl.arange(0, ROWS // 16)[None, None, None, :, None, None, None] * 16
    halves = tl.arange(0, 2)[None, None, None, None, :, None, None] * 8
    pair = tl.arange(0, PAIRS)[None, None, None, None, None, :, None]
    group = tl.arange(0, GROUPS)[None, None, None, None, None, None, :]
    eights = tl.arange(0, 8)[None, :, None, None, None, None, None]
    band = tl.program_id(0) * (BANDS * ROWS)
    rows = row + tl.minimum(band + warp % BANDS * ROWS + sixteens + halves + eights, n - 1)
    word = ((group * 4 + t_w // 2) * PAIRS + pair) * 2 + t_w % 2 + warp // BANDS * (STEPS * STRIP)
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
    token = tl.minimum(tl.program_id(1) * M + token // (TOKENS // M), m - 1)
    x_from += token.to(tl.int64) * x_stride + x_at * x_apart
    x_some = token >= 0

    if ROWED:  # [t, eights, warp, sixteens, halves, group]: a thread's scales of a group
        COUNT: tl.constexpr = 2 * PAIRS if E2M1 else 1
        s_warp = tl.arange(0, WARPS)[None, None, :, None, None, None]
        s_rows = band + s_warp % BANDS * ROWS + tl.arange(0, 8)[None, :, None, None, None, None]
        s_rows += tl.arange(0, ROWS // 16)[None, None, None, :, None, None] * 16
        s_rows = row + tl.minimum(s_rows + tl.arange(0, 2)[None, None, None, None, :, None] * 8, n - 1)
        s_t = tl.arange(0, 4)[:, None, None, None, None, None]
        if SWIZZLED:  # scale_column is 1, which the compiler does not know
            s_t = s_t * scale_column
        s_group = tl.arange(0, GROUPS)[None, None, None, None, None, :]
        if E2M1:
            SSTEP: tl.constexpr = GROUPS * 4 * COUNT
            BLOCK: tl.constexpr = 16
            s_at = (s_group * 4 + s_t) * COUNT
        else:
            SSTEP: tl.constexpr = GROUPS * 2 * PAIRS
            BLOCK: tl.constexpr = 32
            s_at = s_group * (2 * PAIRS) + s_t * PAIRS // 2
        s_at += s_warp // BANDS * (STEPS * SSTEP)
        s_left = (k + BLOCK - 1) // BLOCK - s_at
        s_from = scale + _places(s_rows, s_at, scale_row, scale_column, SWIZZLED)
        s_some = s_rows >= 0
        # Swizzled, a tile has 4 places side by side, and 512 bytes.
        s_stride = SSTEP // 4 * 512 if SWIZZLED else SSTEP * scale_column
    if SCALES == "units":  # [WARPS, ROWS, 1], and of x [WARPS, 1, TOKENS]
        u_first = (tl.arange(0, WARPS) // BANDS * STEPS)[:, None, None]
        u_rows = (
            band + (tl.arange(0, WARPS) % BANDS)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]
        )
        u_rows = row + tl.minimum(u_rows, n - 1)
        u_scale = scale + scale_start + (u_rows // unit_rows).to(tl.int64) * scale_row
        u_some = u_rows >= 0
        u_token = tl.program_id(1) * M + tl.arange(0, TOKENS)[None, None, :] // (TOKENS // M)
        u_token = tl.minimum(u_token, m - 1)
        ux_scale = x_scale + u_token.to(tl.int64) * x_scale_row
        ux_some = u_token >= 0
    if EARLY:
        width = (k + CODES // 8 - 1) // (CODES // 8)
        _fetch(codes, codes_row, row, n, width, STRIP * 8, STEPS, SPLITS, BANDS, ROWS)
        gdc_wait()

    code = tl.load(from_) if EVEN else tl.load(from_, mask=(word * CODES < k) & some, other=0)
    code_2 = code
    if AHEAD == 2:
        more = some & (STEPS > 1)
        mask = more if EVEN else ((word + STRIP) * CODES < k) & more
        code_2 = tl.load(from_ + STRIP, mask=mask, other=0)
    scales = 0
    if ROWED:
        scales = _scales(s_from, s_left, s_some, scale_column, E2M1, WORDS, COUNT, EVEN)
    tile = 0
    if XAHEAD:
        tile = tl.load(x_from) if EVEN else tl.load(x_from, mask=(x_at * XCODES < k) & x_some, other=0)
    total = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    for step in range(0, STEPS):
        if XAHEAD:
            x_tile = tile
            following = tl.minimum(step + 1, STEPS - 1)  # the last tile again: a mask takes instructions
            if EVEN:
                tile = tl.load(x_from + following * (XSTEP * x_apart))
            else:
                mask = x_some & ((x_at + following * XSTEP) * XCODES < k)
                tile = tl.load(x_from + following * (XSTEP * x_apart), mask=mask, other=0)
        elif EVEN:
            x_tile = tl.load(x_from + step * (XSTEP * x_apart))
        else:
            mask = x_some & ((x_at + step * XSTEP) * XCODES < k)
            x_tile = tl.load(x_from + step * (XSTEP * x_apart), mask=mask, other=0)
        current = code
        if not EVEN:
            current = _kept(current, k - (word + step * STRIP) * CODES, CODES)
        # What later steps need is asked for before this one computes.
        code = code_2
        more = some & (step + AHEAD < STEPS)
        mask = more if EVEN else ((word + (step + AHEAD) * STRIP) * CODES < k) & more
        code_2 = tl.load(from_ + (step + AHEAD) * STRIP, mask=mask, other=0)
        if AHEAD == 1:
            code = code_2
        s_current = scales
        if ROWED:
            following = s_from + (step + 1) * s_stride
            s_more = s_some & (step + 1 < STEPS)
            left = s_left - (step + 1) * SSTEP
            scales = _scales(following, left, s_more, scale_column, E2M1, WORDS, COUNT, EVEN)
        if E2M1:
            w = _weights_4(current, s_current, DTYPE, WARPS, ROWS, PAIRS, GROUPS, HARDWARE)
        else:
            w = _weights_8(current, s_current, SCALES, DTYPE, WARPS, ROWS, PAIRS, GROUPS, HARDWARE)
        y = _columns_of_x(x_tile, E2M1, X8, WARPS, TOKENS, PAIRS, GROUPS, HARDWARE)
        if SCALES == "units":
            some_of_it = add_product(tl.zeros((WARPS, ROWS, TOKENS), tl.float32), w, y)
            unit = (u_first + step) // UNIT_STEPS
            there = unit * (UNIT_STEPS * COLUMNS) < k
            some_of_it *= tl.load(u_scale + unit * scale_column, mask=there & u_some, other=0.0)
            if X8:
                some_of_it *= tl.load(ux_scale + unit * x_scale_column, mask=there & ux_some, other=0.0)
            total += some_of_it
        else:
            total = add_product(total, w, y)
    if EARLY:
        gdc_launch_dependents()

    total = tl.sum(tl.reshape(total, (SPLITS, BANDS * ROWS, TOKENS)), 0)
    local = band + tl.arange(0, BANDS * ROWS)
    copies = tl.arange(0, TOKENS)
    tokens = tl.program_id(1) * M + copies // (TOKENS // M)
    if SCALES == "whole":
        rows_of_scale = (row + tl.minimum(local, n - 1)) // unit_rows
        total *= tl.load(scale + scale_start + rows_of_scale.to(tl.int64) * scale_row)[:, None]
        if X8:
            total *= tl.load(x_scale + tl.minimum(tokens, m - 1).to(tl.int64) * x_scale_row)[None, :]
    if E2M1:
        s2 = tl.load(scale_2 + part)
        # Powers of two go where nothing overflows.
        total = tl.where(s2 < 1.0, total * (s2 * (1.0 / SMALLER)), total * (1.0 / SMALLER) * s2)
    if BIAS:
        total += tl.load(bias + column + local, mask=local < n, other=0.0).to(tl.float32)[:, None]
    to = out + tokens.to(tl.int64)[None, :] * out_row + (column + local)[:, None]
    mask = ((tokens < m) & (copies % (TOKENS // M) == 0))[None, :] & (local < n)[:, None]
    tl.store(to, narrow(total, out.dtype.element_ty, HARDWARE), mask=mask)
