"""Kernels from codes and scales back to values. Imports triton.

A product with one rounding in float32, then the result's dtype. Letters as in `fp8` and `blockscaled`.
"""

import triton
import triton.language as tl

from olq.kernels.memory import offsets, places, write
from olq.kernels.rounding import e2m1_value, e4m3_value, power_of_two


@triton.jit
def _store(pointers, values, mask, FULL: tl.constexpr, HARDWARE: tl.constexpr):
    wanted: tl.constexpr = pointers.dtype.element_ty
    if wanted == tl.bfloat16 and not HARDWARE:  # Triton's interpreter cuts where it should round
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        rounded = tl.where(values != values, 0x7FC0, rounded).to(tl.int16)
        write(pointers, rounded.to(tl.bfloat16, bitcast=True), mask, FULL)
    else:
        write(pointers, values.to(wanted), mask, FULL)


@triton.jit
def dequantize_fp8(
    codes,
    scale,
    out,
    n,
    k,
    unit_rows,
    unit_columns,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_down,
    scale_across,
    out_batch,
    out_row,
    out_column,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """code * scale, for units of any size; GROUP neighbours from a multiple of GROUP on are in one unit."""
    batch = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    first_column = tl.program_id(0).to(tl.int64) * COLUMNS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (rows < n - first_row)[:, None] & (columns < k - first_column)[None, :]
    codes += batch * codes_batch + first_row * codes_row + first_column * codes_column
    out += batch * out_batch + first_row * out_row + first_column * out_column
    groups = tl.arange(0, COLUMNS // GROUP) * GROUP
    down = (first_row.to(tl.int32) + rows) // unit_rows
    right = (first_column.to(tl.int32) + groups) // unit_columns
    at = scale + batch * scale_batch + offsets(down, right, scale_down, scale_across, True)
    from_ = codes + offsets(rows, columns, codes_row, codes_column, WIDE)
    code = tl.load(from_) if FULL else tl.load(from_, mask=mask, other=0)
    there = (rows < n - first_row)[:, None] & (groups < k - first_column)[None, :]
    s = tl.load(at) if FULL else tl.load(at, mask=there, other=0.0)
    values = tl.reshape(e4m3_value(code), (ROWS, COLUMNS // GROUP, GROUP)) * s[:, :, None]
    to = out + offsets(rows, columns, out_row, out_column, WIDE)
    _store(to, tl.reshape(values, (ROWS, COLUMNS)), mask, FULL, HARDWARE)


@triton.jit
def dequantize_mxfp8(
    codes,
    scale,
    out,
    n,
    k,
    row,
    row_step,
    column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_row,
    scale_column,
    out_batch,
    out_row,
    out_column,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """code * 2**(byte - 127)."""
    batch = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    tile = tl.program_id(0)
    first_column = tile.to(tl.int64) * COLUMNS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    blocks = tl.arange(0, COLUMNS // 32)
    inside = (rows < n - first_row)[:, None]
    mask = inside & (columns < k - first_column)[None, :]
    codes += batch * codes_batch + first_row * codes_row + first_column * codes_column
    out += batch * out_batch + first_row * out_row + first_column * out_column
    from_ = codes + offsets(rows, columns, codes_row, codes_column, WIDE)
    block_row = first_row.to(tl.int32) + rows
    block = tile * (COLUMNS // 32) + blocks
    there = places(block_row, block, row, row_step, column, scale_row, scale_column, SWIZZLED)
    at = scale + batch * scale_batch + there
    code = tl.load(from_, mask=mask, other=0)
    byte = tl.load(at, mask=inside & (blocks * 32 < k - first_column)[None, :], other=127)
    value = tl.reshape(e4m3_value(code), (ROWS, COLUMNS // 32, 32))
    value = tl.reshape(value * power_of_two(byte.to(tl.int32))[:, :, None], (ROWS, COLUMNS))
    _store(out + offsets(rows, columns, out_row, out_column, WIDE), value, mask, FULL, HARDWARE)


@triton.jit
def dequantize_nvfp4(
    codes,
    scale,
    scale_2,
    out,
    n,
    k,
    row,
    row_step,
    column,
    codes_batch,
    codes_row,
    codes_column,
    scale_batch,
    scale_row,
    scale_column,
    scale_2_batch,
    out_batch,
    out_row,
    out_column,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """(code * SF) * s2; the first product is exact."""
    batch = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    tile = tl.program_id(0)
    first_column = tile.to(tl.int64) * COLUMNS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    pairs = tl.arange(0, COLUMNS // 2)
    blocks = tl.arange(0, COLUMNS // 16)
    inside = (rows < n - first_row)[:, None]
    codes += batch * codes_batch + first_row * codes_row + first_column // 2 * codes_column
    out += batch * out_batch + first_row * out_row + first_column * out_column
    from_ = codes + offsets(rows, pairs, codes_row, codes_column, WIDE)
    block_row = first_row.to(tl.int32) + rows
    block = tile * (COLUMNS // 16) + blocks
    there = places(block_row, block, row, row_step, column, scale_row, scale_column, SWIZZLED)
    at = scale + batch * scale_batch + there
    byte = tl.load(from_, mask=inside & (pairs * 2 < k - first_column)[None, :], other=0).to(tl.int32)
    sf = tl.load(at, mask=inside & (blocks * 16 < k - first_column)[None, :], other=0)
    values = tl.join(e2m1_value(byte & 15), e2m1_value(byte >> 4))
    values = tl.reshape(values, (ROWS, COLUMNS // 16, 16)) * e4m3_value(sf)[:, :, None]
    values = tl.reshape(values * tl.load(scale_2 + batch * scale_2_batch), (ROWS, COLUMNS))
    mask = inside & (columns < k - first_column)[None, :]
    _store(out + offsets(rows, columns, out_row, out_column, WIDE), values, mask, FULL, HARDWARE)
