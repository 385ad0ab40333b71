"""MXFP8 and NVFP4 kernels: a scale byte for each 32 or 16 columns, at places in a whole weight. Imports triton.

Letters as in `fp8`; row, row_step, column = place of the tensor's first block in the scales. Programs of NVFP4 walk
rows from the last to the first: after a sweep for magnitudes, the last rows are in the cache. PADDED: the scales are
those of this matrix alone, and the program writes 0 where they are filled up to 128 x 4. EARLY: see `tensor`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from olq.kernels.memory import entry_of, offsets, operand, places, read, write
from olq.kernels.rounding import e2m1_pairs, e4m3, e8m0_scale, larger, largest, nvfp4_block_scale


@triton.jit
def _write_scale(at, byte, rows, blocks, n, count, PADDED: tl.constexpr, FULL: tl.constexpr):
    """Store the bytes of `rows` [R] and `blocks` [B], of which the matrix has n and `count`, both int64."""
    inside = (rows < n)[:, None] & (blocks < count)[None, :]
    if PADDED:
        byte = tl.where(inside, byte, 0)
        inside = (rows < (n + 127) // 128 * 128)[:, None] & (blocks < (count + 3) // 4 * 4)[None, :]
    write(at, byte, inside, FULL)


@triton.jit
def quantize_mxfp8(
    source,
    codes,
    scale,
    n,
    k,
    row,
    row_step,
    column,
    source_batch,
    source_row,
    source_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_row,
    scale_column,
    CARRY: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """E4M3 codes and E8M0 bytes; CARRY is the exponent rule's. A program does ROWS x COLUMNS."""
    entry, batch = entry_of(tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    codes = operand(codes, table, entry, 1, TABLE, ALIGNED)
    scale = operand(scale, table, entry, 2, TABLE, ALIGNED)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    tile = tl.program_id(0)
    first_column = tile.to(tl.int64) * COLUMNS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    blocks = tl.arange(0, COLUMNS // 32)
    inside = (first_row + rows < n)[:, None]
    mask = inside & (columns < k - first_column)[None, :]
    source += batch * source_batch + first_row * source_row + first_column * source_column
    codes += batch * codes_batch + first_row * codes_row + first_column * codes_column
    from_ = source + offsets(rows, columns, source_row, source_column, WIDE)
    x = read(from_, mask, FULL, THROUGH, LARGEST, HARDWARE)
    units = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    byte, factor = e8m0_scale(largest(units, 2, HARDWARE), CARRY)
    there = places(
        first_row.to(tl.int32) + rows,
        tile * (COLUMNS // 32) + blocks,
        row,
        row_step,
        column,
        scale_row,
        scale_column,
        SWIZZLED,
    )
    at = scale + batch * scale_batch + there
    down = first_row + rows
    count = (tl.cast(k, tl.int64) + 31) // 32
    here = first_column // 32 + blocks
    _write_scale(at, byte.to(tl.uint8), down, here, tl.cast(n, tl.int64), count, PADDED, FULL)
    y = tl.where((factor != 0.0)[:, :, None], units * factor[:, :, None], 0.0)
    to = codes + offsets(rows, columns, codes_row, codes_column, WIDE)
    write(to, tl.reshape(e4m3(y, HARDWARE), (ROWS, COLUMNS)), mask, FULL)


@triton.jit
def _half(
    source,
    rows,
    columns,
    limit,
    inside,
    source_row,
    source_column,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Elements of even and of odd `columns`, [1, B, 8], of each row: two [R, B, 4]."""
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    from_ = source + rows[:, None, None] * source_row + columns * source_column
    x = read(from_, inside[:, None, None] & (columns < limit), FULL, THROUGH, LARGEST, HARDWARE)
    return tl.split(tl.reshape(x, (ROWS, BLOCKS, 4, 2)))


@triton.jit
def quantize_nvfp4(
    source,
    codes,
    scale,
    scale_2,
    n,
    k,
    row,
    row_step,
    column,
    source_batch,
    source_row,
    source_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_row,
    scale_column,
    scale_2_batch,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """Packed E2M1 codes and E4M3 bytes.

    A block is read in two halves, so that one thread has all of it and works out its scale alone.
    """
    BLOCKS: tl.constexpr = COLUMNS // 16
    if EARLY:
        gdc_wait()
    entry, batch = entry_of(tl.num_programs(2) - 1 - tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    codes = operand(codes, table, entry, 1, TABLE, ALIGNED)
    scale = operand(scale, table, entry, 2, TABLE, ALIGNED)
    scale_2 = operand(scale_2, table, entry, 3, TABLE, ALIGNED)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64) * ROWS
    tile = tl.program_id(0)
    first_column = tile.to(tl.int64) * COLUMNS
    rows = tl.arange(0, ROWS)
    blocks = tl.arange(0, BLOCKS)
    inside = first_row + rows < n
    limit = k - first_column
    source += batch * source_batch + first_row * source_row + first_column * source_column
    eight = blocks[None, :, None] * 16 + tl.arange(0, 8)[None, None, :]
    low_0, high_0 = _half(
        source, rows, eight, limit, inside, source_row, source_column,
        THROUGH, LARGEST, ROWS, BLOCKS, FULL, WIDE, HARDWARE,
    )  # fmt: skip
    low_1, high_1 = _half(
        source, rows, eight + 8, limit, inside, source_row, source_column,
        THROUGH, LARGEST, ROWS, BLOCKS, FULL, WIDE, HARDWARE,
    )  # fmt: skip
    four = larger(
        larger(tl.abs(low_0), tl.abs(high_0), HARDWARE),
        larger(tl.abs(low_1), tl.abs(high_1), HARDWARE),
        HARDWARE,
    )
    s2 = tl.load(scale_2 + batch * scale_2_batch)
    byte, factor, keep = nvfp4_block_scale(largest(four, 2, HARDWARE), s2, HARDWARE)
    there = places(
        first_row.to(tl.int32) + rows,
        tile * BLOCKS + blocks,
        row,
        row_step,
        column,
        scale_row,
        scale_column,
        SWIZZLED,
    )
    at = scale + batch * scale_batch + there
    down = first_row + rows
    count = (tl.cast(k, tl.int64) + 15) // 16
    here = first_column // 16 + blocks
    _write_scale(at, byte, down, here, tl.cast(n, tl.int64), count, PADDED, FULL)
    packed_0 = e2m1_pairs(low_0, high_0, factor[:, :, None], keep[:, :, None], HARDWARE)
    packed_1 = e2m1_pairs(low_1, high_1, factor[:, :, None], keep[:, :, None], HARDWARE)
    packed = tl.reshape(tl.permute(tl.join(packed_0, packed_1), (0, 1, 3, 2)), (ROWS, COLUMNS // 2))
    pairs = tl.arange(0, COLUMNS // 2)
    codes += batch * codes_batch + first_row * codes_row + first_column // 2 * codes_column
    to = codes + offsets(rows, pairs, codes_row, codes_column, WIDE)
    write(to, packed, inside[:, None] & (pairs < limit - limit // 2)[None, :], FULL)
