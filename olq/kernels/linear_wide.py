"""Products of some tens of rows of x with a quantized weight, and the sums of their shares. Imports triton.

Letters, scales and EVEN as in `linear_small`, the order of codes as in `linear_weights`; EARLY as there too, but that
`product` lets the next launch go after the last step, and asks for no E2M1 codes before it waits: asking made nvfp4
with 16 rows of x 0.3 us of 16 slower.

Program   WARPS x 16 rows of the weight times TOKENS tokens times one of SHARES shares of the columns, which it walks in
          STEPS steps. x goes through shared memory, once a program and step, and decoded weights do not: on compute
          capability 9.x that is what its tensor cores can take, and they read x for all warps. So x moves less often
          than in `linear_small`, where each warp reads it.
Pieces    a step is PIECES products, one after the other: a thread reads 16 bytes of a row PIECES times PAIRS times side
          by side, E2M1 in pieces, E4M3 in pairs, and its scales of a step at once.
Ahead     what the next step needs is asked for as soon as this one has no more use for the registers, so that nothing
          has to be moved, which would wait for what is moved: codes of a piece, and scales with the last one's, when
          they have been decoded, x when it has been laid down. AHEAD: all of it first, at the cost of registers.
Shares    with 128 rows a program there are 64 programs for 8192 rows, fewer than multiprocessors, and with fewer rows x
          is read more often: so columns are divided too. Each program writes the sum of its columns, scaled, in
          float32: [SHARES, m, columns of the result]; `add` adds them, in order, with the bias. One share needs
          neither. Each share has columns; its last step may have none, and an infinite scale on that sum, which is
          zero, would make a NaN.
Apart     a share's steps lie APART steps apart: 1, or SHARES, so that shares take turns, and programs that run at the
          same time read side by side.
DENSE     columns of x are next to each other. Where they are not, x is read in the order of the weights at once: Triton
          3.6 can't bring what it reads in another order there.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from olq.kernels.linear_decode import add_product, narrow
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
def _rows_of_w(w, WARPS: tl.constexpr, COLUMNS: tl.constexpr):
    """w' [16 WARPS, COLUMNS] from `weights`."""
    w = tl.permute(w, (4, 3, 5, 2, 7, 6, 1, 8, 9, 0, 10))
    return tl.reshape(w, (16 * WARPS, COLUMNS))


@triton.jit
def _columns_of_x(tile, E2M1: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """x [columns of a piece, TOKENS] in the order of the weights, from [TOKENS, columns] as it lies in memory."""
    if E2M1:
        y = tl.reshape(tile, (TOKENS, 4, PAIRS, 2, 2, 2, 2, 2))
        y = tl.permute(y, (0, 2, 3, 4, 6, 7, 1, 5))
    else:
        y = tl.reshape(tile, (TOKENS, 4, PAIRS, 2, 2, 2, 2))
        y = tl.permute(y, (0, 2, 3, 4, 5, 1, 6))
    return tl.trans(tl.reshape(y, (TOKENS, PAIRS * (128 if E2M1 else 64))))


@triton.jit
def _column(c, E2M1: tl.constexpr, PAIRS: tl.constexpr):
    """Which column of a piece is column `c` in the order of the weights."""
    WORD: tl.constexpr = 16 if E2M1 else 8  # codes
    pair, t = c // (8 * WORD), c // 2 % 4
    at = t * (2 * WORD * PAIRS) + pair * (2 * WORD) + c // (4 * WORD) % 2 * WORD
    if E2M1:
        return at + c // 32 % 2 * 8 + c % 2 * 4 + c // 16 % 2 * 2 + c // 8 % 2
    else:
        return at + c // 16 % 2 * 4 + c // 8 % 2 * 2 + c % 2


@triton.jit
def _words_to(step, piece: tl.constexpr, STRIP: tl.constexpr, PAIRS: tl.constexpr):
    """How far a step's piece is from the first step's first one, in words of a row."""
    return step * STRIP + piece * (PAIRS * 2)


@triton.jit
def _read_codes(
    codes, step, piece: tl.constexpr, STRIP: tl.constexpr, CODES: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Words of a step's piece. `codes` are the first one's addresses, and how many codes the row has from there on."""
    from_, left = codes
    at = _words_to(step, piece, STRIP, PAIRS)
    if EVEN:
        return tl.load(from_ + at, eviction_policy="evict_first")
    else:
        return tl.load(from_ + at, mask=left > at * CODES, other=0, eviction_policy="evict_first")


@triton.jit
def _read_x(
    x, step, piece: tl.constexpr, STRIP: tl.constexpr, CODES: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """x for a step's piece. `x` as `codes` above, and how far columns are apart."""
    from_, left, apart = x
    at = _words_to(step, piece, STRIP, PAIRS) * CODES
    if EVEN:
        return tl.load(from_ + at * apart)
    else:
        return tl.load(from_ + at * apart, mask=left > at, other=0)


@triton.jit
def _read_scales(
    scales, step, E2M1: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr, STRIP: tl.constexpr,
    PIECES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A step's; 0 where none stand in w'. `scales` from `scales_of`, and how far they are apart."""
    if E2M1 or SCALES == "e8m0":
        from_, left, some, stride, apart = scales
        BLOCKS: tl.constexpr = STRIP if E2M1 else STRIP // 4  # of a row and step
        COUNT: tl.constexpr = 2 * PIECES if E2M1 else 1
        return read_scales(from_ + step * stride, left - step * BLOCKS, some, apart, COUNT, WORDS, EVEN)
    else:
        return 0


@triton.jit
def _read(
    places, step, E2M1: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr, PAIRS: tl.constexpr,
    PIECES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a step needs: (codes of its pieces, x for them, scales).

    Scales are asked for first: where this asks for each step (AHEAD), mxfp8 took 4 to 7 % longer when they came last.
    """
    CODES: tl.constexpr = 16 if E2M1 else 8
    STRIP: tl.constexpr = PIECES * PAIRS * 8
    scales = _read_scales(places[2], step, E2M1, SCALES, WORDS, STRIP, PIECES, EVEN)
    codes, tiles = (), ()
    for piece in tl.static_range(PIECES):
        codes = codes + (_read_codes(places[0], step, piece, STRIP, CODES, PAIRS, EVEN),)
        tiles = tiles + (_read_x(places[1], step, piece, STRIP, CODES, PAIRS, EVEN),)
    return codes, tiles, scales


@triton.jit
def _step(
    total, held, places, units, step, LAST: tl.constexpr, E2M1: tl.constexpr, SCALES: tl.constexpr, WORDS: tl.constexpr,
    DENSE: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PIECES: tl.constexpr,
    AHEAD: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The sum with a step's products, of what is `held`; and what the next step needs, of which the LAST has none."""
    CODES: tl.constexpr = 16 if E2M1 else 8
    STRIP: tl.constexpr = PIECES * PAIRS * 8
    COLUMNS: tl.constexpr = PAIRS * 8 * CODES  # of a piece
    codes, tiles, scales = held
    next_codes, next_tiles, next_scales, ys = (), (), scales, ()
    if AHEAD and not LAST:
        next_codes, next_tiles, next_scales = _read(
            places, step + APART, E2M1, SCALES, WORDS, PAIRS, PIECES, EVEN
        )
    if E2M1:  # x of all pieces is laid down before any is decoded; of E4M3 afterwards. Either was faster so.
        for piece in tl.static_range(PIECES):
            ys = ys + (_columns_of_x(tiles[piece], E2M1, TOKENS, PAIRS) if DENSE else tiles[piece],)
        if not (AHEAD or LAST):
            for piece in tl.static_range(PIECES):
                next_tiles = next_tiles + (
                    _read_x(places[1], step + APART, piece, STRIP, CODES, PAIRS, EVEN),
                )
    for piece in tl.static_range(PIECES):
        words = codes[piece]
        if not EVEN:
            words = kept(words, places[0][1] - _words_to(step, piece, STRIP, PAIRS) * CODES, CODES)
        w = weights(
            words, scales >> (16 * piece), E2M1, SCALES, tiles[0].dtype, WARPS, 16, PAIRS, 1, HARDWARE
        )
        w = _rows_of_w(w, WARPS, COLUMNS)
        if not (AHEAD or LAST):
            next_codes = next_codes + (
                _read_codes(places[0], step + APART, piece, STRIP, CODES, PAIRS, EVEN),
            )
            if piece == PIECES - 1:
                next_scales = _read_scales(places[2], step + APART, E2M1, SCALES, WORDS, STRIP, PIECES, EVEN)
        if not E2M1:
            ys = ys + (_columns_of_x(tiles[piece], E2M1, TOKENS, PAIRS) if DENSE else tiles[piece],)
            if not (AHEAD or LAST):
                next_tiles = next_tiles + (
                    _read_x(places[1], step + APART, piece, STRIP, CODES, PAIRS, EVEN),
                )
        if SCALES == "units":
            from_, apart, first, steps, k = units
            column = (first + step) * (STRIP * CODES)
            u = tl.load(from_ + tl.minimum(column, k - 1) // (steps * STRIP * CODES) * apart)
            u = tl.where(column < k, u, 0.0)  # the sum is zero then, and zero times an infinity is NaN
            total += add_product(tl.zeros(total.shape, tl.float32), w, ys[piece]) * u[:, None]
        else:
            total = add_product(total, w, ys[piece])
    return total, (next_codes, next_tiles, next_scales)


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
    PIECES: tl.constexpr,
    AHEAD: tl.constexpr,
    APART: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT_STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`out` is the result, or float32 of the shares. `scale_column` as in `linear_small.product`."""
    tl.static_assert(PAIRS == 1 if E2M1 else PIECES == 1, "E2M1 is read in pieces, E4M3 in pairs")
    CODES: tl.constexpr = 16 if E2M1 else 8  # a word
    SIDE: tl.constexpr = PIECES * PAIRS  # 16 bytes of a thread, side by side
    STRIP: tl.constexpr = SIDE * 8  # words of a row and step
    ROWS: tl.constexpr = 16 * WARPS
    band = tl.program_id(0) // SHARES * ROWS
    # The share's first step, counted over all columns. Steps are numbered from it: its own are 0, APART, 2 APART ...
    first = tl.program_id(0) % SHARES
    if APART == 1:
        first *= STEPS
    rows, word = words_of(row, band, n, 1, WARPS, 16, SIDE, 1, STEPS, PAIRS)
    word += first * STRIP
    from_ = codes.to(tl.pointer_type(tl.int64)) + (rows.to(tl.int64) * (codes_row // 8) + word)
    codes_place = from_, tl.broadcast_to(k - word * CODES, from_.shape)

    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    RUN: tl.constexpr = 2 * PAIRS * CODES  # neighbouring columns of a thread's piece
    c = tl.arange(0, 4 * RUN)
    if not DENSE:  # in the order of the weights: no read takes neighbouring columns
        c = _column(c, E2M1, PAIRS)
    x_at = first * (STRIP * CODES) + c // RUN * (RUN * PIECES) + c % RUN
    x_token = tl.minimum(tokens, m - 1)
    if DENSE:  # [TOKENS, columns], as it lies in memory
        x_at, x_token = x_at[None, :], x_token[:, None]
    else:  # [columns, TOKENS]
        x_at, x_token = x_at[:, None], x_token[None, :]
    from_ = x + (x_token.to(tl.int64) * x_row + x_at * x_column)
    x_place = from_, tl.broadcast_to(k - x_at, from_.shape), x_column

    scales_place = (scale,)
    if E2M1 or SCALES == "e8m0":  # scales stand in w'
        from_, left, some, stride = scales_of(
            scale, row, band, n, k, first, scale_row, scale_column, E2M1, SWIZZLED, 1, WARPS, 16, SIDE, 1, STEPS
        )  # fmt: skip
        scales_place = from_, left, some, stride, scale_column
    local = band + tl.arange(0, ROWS)
    units = (scale,)
    if SCALES == "units":
        unit = ((row + tl.minimum(local, n - 1)) // unit_rows).to(tl.int64)
        units = scale + scale_start + unit * scale_row, scale_column, first, UNIT_STEPS, k
    if EARLY:
        if not E2M1:
            start = first * (STRIP * 8)  # bytes, and codes of E4M3
            ask(codes + start, codes_row, row, band, n, k - start, STRIP * 8, STEPS, 1, WARPS, 16)
        gdc_wait()

    places = codes_place, x_place, scales_place
    held = _read(places, 0, E2M1, SCALES, WORDS, PAIRS, PIECES, EVEN)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in tl.range(0, (STEPS - 1) * APART, APART):
        total, held = _step(
            total, held, places, units, step, False, E2M1, SCALES, WORDS, DENSE, WARPS, TOKENS, PAIRS, PIECES, AHEAD,
            APART, EVEN, HARDWARE,
        )  # fmt: skip
    total, _ = _step(
        total, held, places, units, (STEPS - 1) * APART, True, E2M1, SCALES, WORDS, DENSE, WARPS, TOKENS, PAIRS, PIECES,
        AHEAD, APART, EVEN, HARDWARE,
    )  # fmt: skip
    if EARLY:
        gdc_launch_dependents()

    of_sum = scales_of_sum(
        scale, scale_2, part, row, local, n, scale_start, scale_row, unit_rows, E2M1, SCALES
    )
    total = scaled(total, of_sum, E2M1, SCALES)
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
