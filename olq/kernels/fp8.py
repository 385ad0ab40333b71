"""FP8 kernels: a unit is a row, a block or a group of columns. The whole matrix is in `tensor`. Imports triton.

Letters   n, k = rows and columns of a matrix; *_batch, *_row, *_column = strides in elements; *_down, *_across
          = strides of the scales' grid. Programs: column tile, row tile, matrix.
Arithmetic is that of olq.numerics.fp8, each element read once (twice for rows that registers can't hold).
"""

import triton
import triton.language as tl

from olq.kernels.memory import entry_of, offsets, operand, read, write
from olq.kernels.rounding import e4m3, fp8_scale, larger, largest


@triton.jit
def quantize_rows(
    source,
    codes,
    scale,
    n,
    k,
    source_batch,
    source_row,
    source_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_down,
    POWER: tl.constexpr,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONCE: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """One scale a row. ONCE: COLUMNS hold a whole row; else it is walked twice."""
    entry, batch = entry_of(tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (first + rows < n)[:, None]
    source += batch * source_batch + first * source_row
    from_ = source + offsets(rows, columns, source_row, source_column, WIDE)
    x = read(from_, inside & (columns < k)[None, :], FULL, THROUGH, LARGEST, HARDWARE)
    amax = largest(x, 1, HARDWARE)
    if not ONCE:
        start = tl.cast(COLUMNS, tl.int64)
        while start < k:  # a range over numbers of a kernel fails in Triton 3.6's interpreter with NumPy 2.4
            mask = inside & (columns < k - start)[None, :]
            x = read(from_ + start * source_column, mask, False, THROUGH, LARGEST, HARDWARE)
            amax = larger(amax, largest(x, 1, HARDWARE), HARDWARE)
            start += COLUMNS
    unit_scale, factor = fp8_scale(amax, POWER, HARDWARE)
    # Asked of the table late: pointers that wait for the rows take registers.
    codes = operand(codes, table, entry, 1, TABLE, ALIGNED)
    scale = operand(scale, table, entry, 2, TABLE, ALIGNED)
    codes += batch * codes_batch + first * codes_row
    to = codes + offsets(rows, columns, codes_row, codes_column, WIDE)
    good = (factor != 0.0)[:, None]
    tl.store(scale + batch * scale_batch + (first + rows) * scale_down, unit_scale, mask=first + rows < n)
    if ONCE:
        y = tl.where(good, x * factor[:, None], 0.0)
        write(to, e4m3(y, HARDWARE), inside & (columns < k)[None, :], FULL)
    else:
        start = tl.cast(0, tl.int64)
        while start < k:
            mask = inside & (columns < k - start)[None, :]
            x = read(from_ + start * source_column, mask, False, THROUGH, LARGEST, HARDWARE)
            y = tl.where(good, x * factor[:, None], 0.0)
            write(to + start * codes_column, e4m3(y, HARDWARE), mask, False)
            start += COLUMNS


@triton.jit
def quantize_blocks(
    source,
    codes,
    scale,
    n,
    k,
    unit_rows,
    unit_columns,
    source_batch,
    source_row,
    source_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_down,
    scale_across,
    POWER: tl.constexpr,
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
    """One scale for each unit_rows x unit_columns, which ROWS x COLUMNS hold; a program does one."""
    entry, batch = entry_of(tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    codes = operand(codes, table, entry, 1, TABLE, ALIGNED)
    scale = operand(scale, table, entry, 2, TABLE, ALIGNED)
    i = tl.program_id(1)
    j = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    down = (rows < unit_rows) & (rows < n - i * unit_rows)
    mask = down[:, None] & ((columns < unit_columns) & (columns < k - j * unit_columns))[None, :]
    first_row = i.to(tl.int64) * unit_rows
    first_column = j.to(tl.int64) * unit_columns
    source += batch * source_batch + first_row * source_row + first_column * source_column
    codes += batch * codes_batch + first_row * codes_row + first_column * codes_column
    from_ = source + offsets(rows, columns, source_row, source_column, WIDE)
    x = read(from_, mask, FULL, THROUGH, LARGEST, HARDWARE)
    amax = largest(largest(x, 1, HARDWARE)[None, :], 1, HARDWARE)
    unit_scale, factor = fp8_scale(amax, POWER, HARDWARE)
    at = scale + batch * scale_batch + i.to(tl.int64) * scale_down + j.to(tl.int64) * scale_across
    tl.store(at + tl.arange(0, 1), unit_scale)
    y = tl.where((factor != 0.0)[:, None], x * factor[:, None], 0.0)
    to = codes + offsets(rows, columns, codes_row, codes_column, WIDE)
    write(to, e4m3(y, HARDWARE), mask, FULL)


@triton.jit
def quantize_groups(
    source,
    codes,
    scale,
    n,
    k,
    source_batch,
    source_row,
    source_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_down,
    scale_across,
    POWER: tl.constexpr,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """One scale for each GROUP columns of a row."""
    entry, batch = entry_of(tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    codes = operand(codes, table, entry, 1, TABLE, ALIGNED)
    scale = operand(scale, table, entry, 2, TABLE, ALIGNED)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    tile = tl.program_id(0)
    first_column = tile.to(tl.int64) * COLUMNS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    groups = tl.arange(0, COLUMNS // GROUP)
    inside = (first_row + rows < n)[:, None]
    mask = inside & (columns < k - first_column)[None, :]
    source += batch * source_batch + first_row * source_row + first_column * source_column
    codes += batch * codes_batch + first_row * codes_row + first_column * codes_column
    from_ = source + offsets(rows, columns, source_row, source_column, WIDE)
    x = read(from_, mask, FULL, THROUGH, LARGEST, HARDWARE)
    units = tl.reshape(x, (ROWS, COLUMNS // GROUP, GROUP))
    unit_scale, factor = fp8_scale(largest(units, 2, HARDWARE), POWER, HARDWARE)
    scale += batch * scale_batch + first_row * scale_down + first_column // GROUP * scale_across
    at = scale + offsets(rows, groups, scale_down, scale_across, True)
    write(at, unit_scale, inside & (groups * GROUP < k - first_column)[None, :], FULL)
    y = tl.where((factor != 0.0)[:, :, None], units * factor[:, :, None], 0.0)
    to = codes + offsets(rows, columns, codes_row, codes_column, WIDE)
    write(to, tl.reshape(e4m3(y, HARDWARE), (ROWS, COLUMNS)), mask, FULL)
