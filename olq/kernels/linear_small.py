"""Products of a few rows of x with a quantized weight: what limits them is reading the weight once. Imports triton.

Letters   m = rows of x (tokens); n, k = rows and columns of the weight's part; row, column = the part's first row in
          the kernel format, and in the result. *_row, *_column = strides in elements.
Program   BANDS x ROWS rows of the weight times TOKENS tokens, of which M are there. A warp has one band and one of
          SPLITS shares of the columns: it walks STEPS tiles of COLUMNS. The sums of all shares are added at the end,
          always in one order.
Order     a sum over columns may take them in any order, if both sides do. A thread reads 16 bytes of a row of codes at
          a time, and its three neighbours the next ones; what it decodes is just what the tensor cores of Ampere and
          later want in this thread, so that weights never pass through shared memory. x is read in that order: by
          each thread for itself, or, SHARED, through shared memory, which is faster for a single token.
EVEN      whole tiles hold k columns exactly.
"""

import triton
import triton.language as tl

from olq.kernels.linear_decode import add_product, block_values, e4m3_values, narrow
from olq.kernels.rounding import e4m3_value, power_of_two


@triton.jit
def _places(rows, columns, row_stride, column_stride, SWIZZLED: tl.constexpr):
    """Offsets of scales, given their rows and columns; `row_stride` of swizzled places: the tensor's width."""
    if SWIZZLED:
        tile = rows // 128 * (row_stride // 4) + columns // 4
        return tile.to(tl.int64) * 512 + (rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4)
    return rows.to(tl.int64) * row_stride + columns * column_stride


@triton.jit
def _row_numbers(n, row, SPLITS: tl.constexpr, BANDS: tl.constexpr, ROWS: tl.constexpr):
    """[8, SPLITS BANDS, ROWS / 16, 2, 1, 1]: a thread has rows that are 8 apart. Those beyond the last repeat it."""
    eights = tl.arange(0, 8)[:, None, None, None, None, None]
    bands = (tl.arange(0, SPLITS * BANDS) % BANDS)[None, :, None, None, None, None] * ROWS
    sixteens = tl.arange(0, ROWS // 16)[None, None, :, None, None, None] * 16
    halves = tl.arange(0, 2)[None, None, None, :, None, None] * 8
    return tl.minimum(tl.program_id(0) * (BANDS * ROWS) + bands + sixteens + halves + eights, n - 1) + row


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    """[..., 2, 2, 2] of eight tensors, in this order."""
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def _operand(values, WARPS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[WARPS, ROWS, 128 GROUPS] from eight values of each [t w, eights, warp, sixteens, halves, v, group]."""
    values = tl.reshape(values, (4, 2, 8, WARPS, ROWS // 16, 2, 2, GROUPS, 2, 4))
    values = tl.permute(values, (3, 4, 5, 2, 7, 6, 1, 8, 0, 9))
    return tl.reshape(values, (WARPS, ROWS, GROUPS * 128))


@triton.jit
def _common(
    x, SPLITS: tl.constexpr, BANDS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """[SPLITS BANDS, 128 GROUPS, TOKENS] from [WIDTH, SPLITS, 128 GROUPS / WIDTH, M]: in the order of `_operand`, for
    each band, and each token TOKENS / M times, side by side.
    """
    x = tl.reshape(tl.permute(x, (1, 2, 0, 3)), (SPLITS, GROUPS, 2, 4, 2, 2, 4, M))
    x = tl.reshape(tl.permute(x, (0, 1, 2, 4, 5, 3, 6, 7)), (SPLITS, 1, GROUPS * 128, M, 1))
    x = tl.broadcast_to(x, (SPLITS, BANDS, GROUPS * 128, M, TOKENS // M))
    return tl.reshape(x, (SPLITS * BANDS, GROUPS * 128, TOKENS))


@triton.jit
def _tokens(m, M: tl.constexpr, TOKENS: tl.constexpr):
    """[1, 8, 1, TOKENS / 8, 1, 1]: M tokens from the program's first one on, each TOKENS / M times. Those beyond the
    last repeat it.
    """
    i = tl.arange(0, 8)[None, :, None, None, None, None]
    i += tl.arange(0, TOKENS // 8)[None, None, None, :, None, None] * 8
    return tl.minimum(tl.program_id(1) * M + i // (TOKENS // M), m - 1)


@triton.jit
def _own(x, WARPS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """[WARPS, 128 GROUPS, TOKENS] from [t c, eights, warp, eights of tokens, r, group]: in the order of `_operand`.

    r c are 32 neighbours, WIDTH of which are c.
    """
    if WIDTH == 8:
        x = tl.reshape(x, (4, 2, 4, 8, WARPS, TOKENS // 8, 4, 1, GROUPS))
    else:
        x = tl.reshape(x, (4, 1, 4, 8, WARPS, TOKENS // 8, 4, 2, GROUPS))
    x = tl.permute(x, (4, 8, 6, 7, 1, 0, 2, 5, 3))
    return tl.reshape(x, (WARPS, GROUPS * 128, TOKENS))


@triton.jit
def _finish(
    total, bias, out, m, n, column, out_row, BIAS: tl.constexpr, SPLITS: tl.constexpr, BANDS: tl.constexpr,
    M: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Sum [SPLITS BANDS, ROWS, TOKENS] over the splits, add the bias, round, store."""
    total = tl.sum(tl.reshape(total, (SPLITS, BANDS * ROWS, TOKENS)), 0)
    rows = tl.program_id(0) * (BANDS * ROWS) + tl.arange(0, BANDS * ROWS)
    copies = tl.arange(0, TOKENS)
    tokens = tl.program_id(1) * M + copies // (TOKENS // M)
    if BIAS:
        total += tl.load(bias + column + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    to = out + tokens.to(tl.int64)[None, :] * out_row + (column + rows)[:, None]
    mask = ((tokens < m) & (copies % (TOKENS // M) == 0))[None, :] & (rows < n)[:, None]
    tl.store(to, narrow(total, out.dtype.element_ty, HARDWARE), mask=mask)


@triton.jit
def product8(
    x,
    codes,
    scale,
    bias,
    out,
    m,
    n,
    k,
    row,
    column,
    x_row,
    x_column,
    codes_row,
    scale_start,
    scale_row,
    scale_column,
    unit_rows,
    unit_columns,
    out_row,
    E8M0: tl.constexpr,
    SWIZZLED: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BANDS: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """E4M3 codes. A scale is for unit_rows x unit_columns, these a multiple of 16; WHOLE: for all columns."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = COLUMNS // 128
    WARPS: tl.constexpr = SPLITS * BANDS
    rows = _row_numbers(n, row, SPLITS, BANDS, ROWS)
    splits = (tl.arange(0, WARPS) // BANDS)[None, :, None, None, None, None] * (STEPS * COLUMNS)
    groups = tl.arange(0, GROUPS)[None, None, None, None, None, :] * 128 + splits
    # A scale each [t, eights, warp, sixteens, halves, v, group]: for 16 columns.
    v = tl.arange(0, 2)[None, None, None, None, None, :, None]
    first = groups[None, :] + v * 64 + tl.arange(0, 4)[:, None, None, None, None, None, None] * 16
    here = rows[None, :] // unit_rows
    scale += scale_start
    # Eight codes each [t w, eights, warp, sixteens, halves, v, group].
    chunks = groups[None, :] // 8 + v * 8 + tl.arange(0, 8)[:, None, None, None, None, None, None]
    from_ = codes.to(tl.pointer_type(tl.int64)) + (rows.to(tl.int64)[None, :] * (codes_row // 8) + chunks)
    if SHARED:  # x [8, SPLITS, COLUMNS / 8, M]
        tokens = tl.minimum(tl.program_id(1) * M + tl.arange(0, M), m - 1)[None, None, None, :]
        columns = tl.arange(0, COLUMNS // 8)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
        columns += tl.arange(0, SPLITS)[None, :, None, None] * (STEPS * COLUMNS)
    else:  # x [t c, eights, warp, eights of tokens, r, group]
        tokens = _tokens(m, M, TOKENS)
        t_c = tl.arange(0, 32)[:, None, None, None, None, None]
        r = tl.arange(0, 4)[None, None, None, None, :, None]
        columns = tl.arange(0, GROUPS) * 128 + r // 2 * 64 + t_c // 8 * 16 + r % 2 * 8 + t_c % 8
        columns += (tl.arange(0, WARPS) // BANDS)[None, None, :, None, None, None] * (STEPS * COLUMNS)
    x += tokens.to(tl.int64) * x_row + columns * x_column
    some = rows[None, :] >= 0
    code = tl.load(from_) if EVEN else tl.load(from_, mask=(chunks * 8 < k) & some, other=0)
    if WHOLE:
        places = scale + _places(here, first * 0, scale_row, scale_column, SWIZZLED)
    else:
        places = scale + _places(here, first // unit_columns, scale_row, scale_column, SWIZZLED)
    unit = tl.load(places, mask=some & (WHOLE | (first < k)), other=0)
    total = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    for step in range(0, STEPS):
        start = step * COLUMNS
        if EVEN:
            tile = tl.load(x + start * x_column)
        else:
            tile = tl.load(x + start * x_column, mask=columns < k - start, other=0.0)
            left = tl.minimum(tl.maximum(k - start - chunks * 8, 0), 8)
            keep = (tl.full(left.shape, 1, tl.int64) << (tl.minimum(left, 7) * 8).to(tl.int64)) - 1
            code = tl.where(left == 8, code, code & keep)  # padding decodes to 0
        factor = power_of_two(unit.to(tl.int32)) if E8M0 else unit
        factor = tl.broadcast_to(factor[:, None], (4, 2, 8, WARPS, ROWS // 16, 2, 2, GROUPS))
        factor = tl.reshape(factor, (8, 8, WARPS, ROWS // 16, 2, 2, GROUPS))
        current = code
        # What the next step needs is asked for before this one computes.
        more = some & (step + 1 < STEPS)
        after = k - start - COLUMNS
        mask = more if EVEN else (chunks * 8 < after) & more
        code = tl.load(from_ + (step + 1) * (COLUMNS // 8), mask=mask, other=0)
        if not WHOLE:
            if E8M0:
                at = places + (step + 1) * (GROUPS * (512 if SWIZZLED else 4 * scale_column))
            else:
                at = scale + _places(
                    here, (first + start + COLUMNS) // unit_columns, scale_row, scale_column, False
                )
            unit = tl.load(at, mask=more if EVEN else (first < after) & more, other=0)
        e = e4m3_values(current, factor, DTYPE, HARDWARE)
        w = _operand(_eight(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]), WARPS, ROWS, GROUPS)
        if SHARED:
            total = add_product(total, w, _common(tile, SPLITS, BANDS, GROUPS, 8, M, TOKENS))
        else:
            total = add_product(total, w, _own(tile, WARPS, GROUPS, 8, TOKENS))
    _finish(total, bias, out, m, n, column, out_row, BIAS, SPLITS, BANDS, M, TOKENS, ROWS, HARDWARE)


@triton.jit
def product4(
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
    scale_row,
    scale_column,
    out_row,
    SWIZZLED: tl.constexpr,
    PAIRS: tl.constexpr,
    WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BANDS: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """E2M1 codes: even and odd columns are two products. PAIRS: neighbours in x are read as one word; WORDS: so are
    four scale bytes.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = COLUMNS // 256
    WARPS: tl.constexpr = SPLITS * BANDS
    rows = _row_numbers(n, row, SPLITS, BANDS, ROWS)
    splits = (tl.arange(0, WARPS) // BANDS)[None, :, None, None, None, None] * (STEPS * COLUMNS // 16)
    groups = tl.arange(0, GROUPS)[None, None, None, None, None, :] * 16 + splits
    t_w = tl.arange(0, 8)[:, None, None, None, None, None, None]
    v = tl.arange(0, 2)[None, None, None, None, None, :, None]
    # Four scale bytes each [t, eights, warp, sixteens, halves, v, group], of which a thread takes two.
    four = groups[None, :] + v * 8 + tl.arange(0, 4)[:, None, None, None, None, None, None] // 2 * 4
    # 16 codes each [t w, eights, warp, sixteens, halves, v, group].
    blocks = groups[None, :] + v * 8 + t_w
    from_ = codes.to(tl.pointer_type(tl.int64)) + (rows.to(tl.int64)[None, :] * (codes_row // 8) + blocks)
    some = rows[None, :] >= 0
    if WORDS:
        words = (
            scale.to(tl.pointer_type(tl.int32)) + _places(rows[None, :], four, scale_row, 1, SWIZZLED) // 4
        )
        word = tl.load(words, mask=(four * 16 < k) & some, other=0)
    else:
        places = _places(rows[None, :], blocks, scale_row, scale_column, SWIZZLED)
        word = tl.load(scale + places, mask=(blocks * 16 < k) & some, other=0)
    if SHARED:  # pairs of x [4, SPLITS, COLUMNS / 8, M]
        tokens = tl.minimum(tl.program_id(1) * M + tl.arange(0, M), m - 1)[None, None, None, :].to(tl.int64)
        pairs = tl.arange(0, COLUMNS // 8)[None, None, :, None] * 4 + tl.arange(0, 4)[:, None, None, None]
        pairs += tl.arange(0, SPLITS)[None, :, None, None] * (STEPS * COLUMNS // 2)
    else:  # pairs of x [t c, eights, warp, eights of tokens, r, group]
        tokens = _tokens(m, M, TOKENS).to(tl.int64)
        t_c = tl.arange(0, 16)[:, None, None, None, None, None]
        r = tl.arange(0, 8)[None, None, None, None, :, None]
        pairs = tl.arange(0, GROUPS) * 128 + r // 4 * 64 + t_c // 4 * 16 + r % 4 * 4 + t_c % 4
        pairs += (tl.arange(0, WARPS) // BANDS)[None, None, :, None, None, None] * (STEPS * COLUMNS // 2)
    neighbours = x.to(tl.pointer_type(tl.int32)) + (tokens * (x_row // 2) + pairs)
    x += tokens * x_row + pairs * (2 * x_column)
    s2 = tl.load(scale_2 + part)
    code = tl.load(from_) if EVEN else tl.load(from_, mask=(blocks * 16 < k) & some, other=0)
    total = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    for step in range(0, STEPS):
        start = step * COLUMNS
        if not EVEN:
            left = tl.minimum(tl.maximum(k - start - blocks * 16, 0), 16)
            keep = (tl.full(left.shape, 1, tl.int64) << (tl.minimum(left, 15) * 4).to(tl.int64)) - 1
            code = tl.where(left == 16, code, code & keep)  # padding decodes to 0
        if PAIRS:
            if EVEN:
                pair = tl.load(neighbours + start // 2)
            else:
                pair = tl.load(neighbours + start // 2, mask=pairs * 2 < k - start, other=0)
            even = (pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
            odd = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        else:
            even = tl.load(x + start * x_column, mask=pairs * 2 < k - start, other=0.0)
            odd = tl.load(x + (start + 1) * x_column, mask=pairs * 2 + 1 < k - start, other=0.0)
        if WORDS:
            byte = tl.broadcast_to(word[:, None], (4, 2, 8, WARPS, ROWS // 16, 2, 2, GROUPS))
            byte = tl.reshape(byte, (8, 8, WARPS, ROWS // 16, 2, 2, GROUPS)) >> (t_w % 4 * 8)
        else:
            byte = word
        sf = e4m3_value(byte & 255)
        current = code
        # What the next step needs is asked for before this one computes.
        more = some & (step + 1 < STEPS)
        after = k - start - COLUMNS
        mask = more if EVEN else (blocks * 16 < after) & more
        code = tl.load(from_ + (step + 1) * (COLUMNS // 16), mask=mask, other=0)
        if WORDS:
            at = words + (step + 1) * (COLUMNS // 64 * (128 if SWIZZLED else 1))
            word = tl.load(at, mask=more if EVEN else (four * 16 < after) & more, other=0)
        else:
            at = (
                scale
                + places
                + (step + 1) * (COLUMNS // 64 * 512 if SWIZZLED else COLUMNS // 16 * scale_column)
            )
            word = tl.load(at, mask=mask, other=0)
        e = block_values(current, sf, s2, DTYPE, HARDWARE)
        low = _operand(_eight(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]), WARPS, ROWS, GROUPS)
        high = _operand(_eight(e[8], e[9], e[10], e[11], e[12], e[13], e[14], e[15]), WARPS, ROWS, GROUPS)
        if SHARED:
            total = add_product(total, low, _common(even, SPLITS, BANDS, GROUPS, 4, M, TOKENS))
            total = add_product(total, high, _common(odd, SPLITS, BANDS, GROUPS, 4, M, TOKENS))
        else:
            total = add_product(total, low, _own(even, WARPS, GROUPS, 4, TOKENS))
            total = add_product(total, high, _own(odd, WARPS, GROUPS, 4, TOKENS))
    _finish(total, bias, out, m, n, column, out_row, BIAS, SPLITS, BANDS, M, TOKENS, ROWS, HARDWARE)
