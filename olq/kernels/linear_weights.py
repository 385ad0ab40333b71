"""Device functions: a program's part of a quantized weight, from memory to a product's operand. Imports triton.

Order     a sum over columns may take them in any order, if both sides do. A thread reads 16 bytes of a row of codes at
          a time, or PAIRS = 2 times as many, and its three neighbours the next ones, GROUPS times; what it decodes
          is just what the tensor cores of Ampere and later want in this thread, so that weights never pass through
          shared memory. x is read in that order too.
Words     int64 of 8 E4M3 or 16 E2M1 codes, [t w, eights, warp, sixteens, halves, pair, group]. t are four threads with
          w = 2 neighbouring words each; rows of the weight: eights are 8 neighbours, halves 2 of them, sixteens 16
          rows each. A warp has one of BANDS bands of ROWS rows, and one of SPLITS shares of the columns: STEPS times
          STRIP words a row.
Scales    of w', which is what is multiplied: E8M0, or E4M3 for blocks of 16; [t, eights, warp, sixteens, halves,
          group]: what a thread needs for its words of a group.
"""

import triton
import triton.language as tl

from olq.kernels.linear_decode import (
    SMALLER,
    e2m1_values,
    e4m3_scaled,
    e4m3_values,
    e8m0_factor,
    four_factors,
    two_factors,
)

_PREFETCH = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }")


@triton.jit
def ask(
    codes, codes_row, row, band, n, width, BYTES: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    BANDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Ask for the lines of a program's first step to be brought into the L2 cache, which is no reading.

    BYTES a row and share, of the `width` that have codes.
    """
    LINES: tl.constexpr = (BYTES + 127) // 128
    ALL: tl.constexpr = SPLITS * BANDS * ROWS * LINES
    THREADS: tl.constexpr = SPLITS * BANDS * 32
    line = tl.arange(0, ALL if ALL > THREADS else THREADS)
    rows = band + line // LINES % (BANDS * ROWS)
    first = line // (LINES * BANDS * ROWS) * (STEPS * BYTES) + line % LINES * 128
    from_ = codes + ((row + rows).to(tl.int64) * codes_row + first)
    there = (line < ALL) & (rows < n) & (first < width)
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [from_, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def words_of(
    row, band, n, SPLITS: tl.constexpr, BANDS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS: tl.constexpr, STEPS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """(rows, words within a row) of the first step. Rows beyond the last of `n` repeat it.

    PAIRS: reads of 16 bytes that a thread has side by side in a step; TAKEN: how many of them these addresses are for.
    """
    STRIP: tl.constexpr = GROUPS * PAIRS * 8
    t_w = tl.arange(0, 8)[:, None, None, None, None, None, None]
    eights = tl.arange(0, 8)[None, :, None, None, None, None, None]
    warp = tl.arange(0, SPLITS * BANDS)[None, None, :, None, None, None, None]
    sixteens = tl.arange(0, ROWS // 16)[None, None, None, :, None, None, None] * 16
    halves = tl.arange(0, 2)[None, None, None, None, :, None, None] * 8
    pair = tl.arange(0, TAKEN)[None, None, None, None, None, :, None]
    group = tl.arange(0, GROUPS)[None, None, None, None, None, None, :]
    rows = row + tl.minimum(band + warp % BANDS * ROWS + sixteens + halves + eights, n - 1)
    return rows, ((group * 4 + t_w // 2) * PAIRS + pair) * 2 + t_w % 2 + warp // BANDS * (STEPS * STRIP)


@triton.jit
def kept(codes, left, CODES: tl.constexpr):
    """Words of which only the first `left` codes are there; the others decode to 0."""
    BITS: tl.constexpr = 64 // CODES
    left = tl.minimum(tl.maximum(left, 0), CODES)
    keep = (tl.full(left.shape, 1, tl.int64) << (tl.minimum(left, CODES - 1) * BITS).to(tl.int64)) - 1
    return tl.where(left == CODES, codes, codes & keep)


@triton.jit
def _places(rows, columns, row_stride, column_stride, SWIZZLED: tl.constexpr):
    """Offsets of scale bytes, given their rows and columns; `row_stride` of swizzled places: the tensor's width."""
    if SWIZZLED:
        tile = rows // 128 * (row_stride // 4) + columns // 4
        return tile.to(tl.int64) * 512 + (rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4)
    return rows.to(tl.int64) * row_stride + columns * column_stride


@triton.jit
def scales_of(
    scale, row, band, n, k, first, scale_row, scale_column, E2M1: tl.constexpr, SWIZZLED: tl.constexpr,
    SPLITS: tl.constexpr, BANDS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """(addresses, scales left, a mask, way to the next step's) of a step that has `first` others before it.

    As for `words_of`. The mask is true, and has the rows' shape.
    """
    BLOCK: tl.constexpr = 16 if E2M1 else 32
    STEP: tl.constexpr = GROUPS * PAIRS * (8 if E2M1 else 2)
    tl.static_assert(not SWIZZLED or STEP % 4 == 0, "swizzled, scales lie in fours")
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    eights = tl.arange(0, 8)[None, :, None, None, None, None]
    warp = tl.arange(0, SPLITS * BANDS)[None, None, :, None, None, None]
    sixteens = tl.arange(0, ROWS // 16)[None, None, None, :, None, None] * 16
    halves = tl.arange(0, 2)[None, None, None, None, :, None] * 8
    group = tl.arange(0, GROUPS)[None, None, None, None, None, :]
    rows = row + tl.minimum(band + warp % BANDS * ROWS + eights + sixteens + halves, n - 1)
    # Swizzled, scale_column is 1, which the compiler does not know: it shall not read threads' scales together.
    t = t * scale_column if SWIZZLED else t
    columns = (group * 4 + t) * (2 * PAIRS) if E2M1 else group * (2 * PAIRS) + t * PAIRS // 2
    columns += warp // BANDS * (STEPS * STEP) + first * STEP
    from_ = scale + _places(rows, columns, scale_row, scale_column, SWIZZLED)
    # Swizzled, a tile has 4 places side by side, and 512 bytes.
    stride = STEP // 4 * 512 if SWIZZLED else STEP * scale_column
    return from_, (k + BLOCK - 1) // BLOCK - columns, rows >= 0, stride


@triton.jit
def read_scales(from_, left, mask, apart, COUNT: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """Int32: a thread's E8M0 byte, or its COUNT neighbouring E4M3 bytes, of which those from `left` on are 0.

    `apart` is how far they are apart; WORDS: they are aligned and next to each other.
    """
    if not EVEN:
        mask = mask & (left > 0)
    if COUNT == 1:
        return tl.load(from_, mask=mask, other=0).to(tl.int32)
    if WORDS:
        TYPE: tl.constexpr = tl.int32 if COUNT == 4 else tl.int16
        word = tl.load(from_.to(tl.pointer_type(TYPE), bitcast=True), mask=mask, other=0).to(tl.int32)
        if not EVEN:
            there = tl.minimum(tl.maximum(left, 0), COUNT)
            word = tl.where(there == 4, word, word & ((1 << (tl.minimum(there, 3) * 8)) - 1))
        return word
    word = tl.zeros(mask.shape, tl.int32)
    for i in tl.static_range(COUNT):
        word |= tl.load(from_ + i * apart, mask=mask & (left > i), other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def weights(
    codes, scales, E2M1: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr, WARPS: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """w' [t, w, eights, warp, sixteens, halves, pair, group, c, 2, 2], from words and their scales.

    Code 4 c + 2 i + j of an E4M3 word is [c, i, j], and code 8 (c // 2) + 4 j + 2 (c % 2) + i of an E2M1 word.
    """
    SIXTEENS: tl.constexpr = ROWS // 16
    if E2M1:
        if PAIRS == 2:  # [..., group, pair, w]
            factor = tl.permute(four_factors(scales, DTYPE, HARDWARE), (0, 7, 1, 2, 3, 4, 6, 5))
        else:  # [..., group, w]
            factor = tl.permute(two_factors(scales, DTYPE, HARDWARE), (0, 6, 1, 2, 3, 4, 5))
        factor = tl.reshape(factor, (8, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS))
        w = e2m1_values(codes, factor, DTYPE, HARDWARE)
        w = tl.permute(w, (0, 1, 2, 3, 4, 5, 6, 10, 7, 8, 9))
    elif SCALES == "e8m0":
        factor = tl.reshape(e8m0_factor(scales, DTYPE, HARDWARE), (4, 1, 8, WARPS, SIXTEENS, 2, 1, GROUPS))
        factor = tl.broadcast_to(factor, (4, 2, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS))
        factor = tl.reshape(factor, (8, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS))
        w = e4m3_scaled(codes, factor, DTYPE, HARDWARE)
    else:
        w = e4m3_values(codes, DTYPE, HARDWARE)
    return tl.reshape(w, (4, 2, 8, WARPS, SIXTEENS, 2, PAIRS, GROUPS, 4 if E2M1 else 2, 2, 2))


@triton.jit
def scales_of_sum(
    scale, scale_2, part, row, local, n, scale_start, scale_row, unit_rows, E2M1: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """(scales of rows, the tensor's) that stand on a sum, 1.0 where none do; `local` are the part's `n` rows, and more.

    Rows from `n` on stand for the last.
    """
    of_rows, of_tensor = 1.0, 1.0
    if SCALES == "whole":
        rows = (row + tl.minimum(local, n - 1)) // unit_rows
        of_rows = tl.load(scale + scale_start + rows.to(tl.int64) * scale_row)
    if E2M1:
        of_tensor = tl.load(scale_2 + part)
    return of_rows, of_tensor


@triton.jit
def scaled(total, scales, E2M1: tl.constexpr, SCALES: tl.constexpr):
    """Sums [rows, tokens] times what `scales_of_sum` gave."""
    if SCALES == "whole":
        total *= scales[0][:, None]
    if E2M1:
        s2 = scales[1]
        # Powers of two go where nothing overflows.
        total = tl.where(s2 < 1.0, total * (s2 * (1.0 / SMALLER)), total * (1.0 / SMALLER) * s2)
    return total
