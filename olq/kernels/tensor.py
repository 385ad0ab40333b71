"""Kernels for scales of a whole matrix: largest magnitudes, what follows from them, FP8 codes. Imports triton.

Two sweeps. The first leaves one magnitude a program in `partial`, [matrices, programs], a few KB; every program of the
second reduces these by itself, so that there is neither an atomic nor memory that has to be cleared. The second
sweep starts where the first ended, at what the cache still holds. LINE: all tiles are in one row, as if dense.

EARLY  launches overlap: what comes second is started when the programs of the first sweep end, and waits before it
       touches memory. The first sweep starts when everything before it is done, so that who waits for it has waited for
       all. (Started with the first sweep, it would hold places on the multiprocessors that the sweep needs.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from olq.kernels.memory import entry_of, offsets, operand, read, write
from olq.kernels.rounding import e4m3, fp8_scale, larger, largest, nvfp4_tensor_scale


@triton.jit
def _place(tile, across, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr):
    """(first row, first column, which elements are there) of a tile."""
    down = 0 if LINE else tile // across
    row = tl.cast(down, tl.int64) * ROWS
    column = tl.cast(tile - down * across, tl.int64) * COLUMNS
    mask = (tl.arange(0, ROWS) < n - row)[:, None] & (tl.arange(0, COLUMNS) < k - column)[None, :]
    return row, column, mask


@triton.jit
def _tile(
    source, local, tile, across, n, k, source_row, source_column, THROUGH: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr,
    FLEETING: tl.constexpr,
):  # fmt: skip
    """One tile of a sweep in float32; `local` are offsets of its elements."""
    row, column, mask = _place(tile, across, n, k, ROWS, COLUMNS, LINE)
    from_ = source + (row * source_row + column * source_column) + local
    return read(from_, mask, FULL, THROUGH, LARGEST, HARDWARE, FLEETING)


@triton.jit
def amax_partials(
    source,
    partial,
    n,
    k,
    across,
    tiles,
    fleeting,
    source_batch,
    source_row,
    source_column,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """partial[matrix, program] = largest magnitude in the tiles that the program walked; every one is written.

    Of a matrix that the cache does not hold, the first `fleeting` tiles make way for the others.
    """
    entry, batch = entry_of(tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    partial = operand(partial, table, entry, 1, TABLE, ALIGNED)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    source += batch * source_batch
    local = offsets(rows, columns, source_row, source_column, WIDE)
    running = tl.zeros((ROWS, COLUMNS), tl.float32)
    tile = program
    # No range: one over numbers of a kernel fails in Triton 3.6's interpreter with NumPy 2.4.
    for late in tl.static_range(2):
        while tile < (tiles if late else fleeting):
            x = _tile(
                source, local, tile, across, n, k, source_row, source_column, THROUGH, LARGEST, ROWS, COLUMNS, LINE,
                FULL, HARDWARE, not late,
            )  # fmt: skip
            running = larger(running, tl.abs(x), HARDWARE)
            tile += programs
    if EARLY:
        gdc_launch_dependents()
    amax = largest(largest(running, 1, HARDWARE)[None, :], 1, HARDWARE)
    tl.store(partial + batch * programs + program + tl.arange(0, 1), amax)


@triton.jit
def _reduce(partial, count, COUNT: tl.constexpr, HARDWARE: tl.constexpr):
    at = tl.arange(0, COUNT)
    return largest(tl.load(partial + at, mask=at < count, other=0.0)[None, :], 1, HARDWARE)


@triton.jit
def nvfp4_scale(
    partial,
    scale_2,
    count,
    scale_batch,
    COUNT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """Write s2 of each matrix from its `count` magnitudes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    entry, batch = entry_of(tl.program_id(2), TABLE)
    partial = operand(partial, table, entry, 0, TABLE, ALIGNED)
    scale_2 = operand(scale_2, table, entry, 1, TABLE, ALIGNED)
    amax = _reduce(partial + batch * count, count, COUNT, HARDWARE)
    tl.store(scale_2 + batch * scale_batch + tl.arange(0, 1), nvfp4_tensor_scale(amax))


@triton.jit
def quantize_tensor(
    source,
    codes,
    scale,
    partial,
    n,
    k,
    across,
    tiles,
    count,
    source_batch,
    source_row,
    source_column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    POWER: tl.constexpr,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    table=None,
    TABLE: tl.constexpr = 0,
    ALIGNED: tl.constexpr = 0,
):
    """FP8 codes with one scale a matrix, after `amax_partials` with `count` programs."""
    if EARLY:
        gdc_wait()
    entry, batch = entry_of(tl.num_programs(2) - 1 - tl.program_id(2), TABLE)
    source = operand(source, table, entry, 0, TABLE, ALIGNED)
    codes = operand(codes, table, entry, 1, TABLE, ALIGNED)
    scale = operand(scale, table, entry, 2, TABLE, ALIGNED)
    partial = operand(partial, table, entry, 3, TABLE, ALIGNED)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    amax = _reduce(partial + batch * count, count, COUNT, HARDWARE)
    unit_scale, factor = fp8_scale(amax, POWER, HARDWARE)
    if program == 0:
        tl.store(scale + batch * scale_batch + tl.arange(0, 1), unit_scale)
    good = (factor != 0.0)[:, None]
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    source += batch * source_batch
    codes += batch * codes_batch
    local_from = offsets(rows, columns, source_row, source_column, WIDE)
    local_to = offsets(rows, columns, codes_row, codes_column, WIDE)
    tile = tiles - 1 - program
    while tile >= 0:
        x = _tile(
            source, local_from, tile, across, n, k, source_row, source_column, THROUGH, LARGEST, ROWS, COLUMNS, LINE,
            FULL, HARDWARE, False,
        )  # fmt: skip
        y = tl.where(good, x * factor[:, None], 0.0)
        row, column, mask = _place(tile, across, n, k, ROWS, COLUMNS, LINE)
        to = codes + (row * codes_row + column * codes_column) + local_to
        write(to, e4m3(y, HARDWARE), mask, FULL)
        tile -= programs
