"""Scales of rows and columns on a float32 product, and its rounding, in one pass. Imports triton."""

import triton
import triton.language as tl

from olq.kernels.memory import finish, widen


@triton.jit
def scale_product(
    product,
    of_rows,
    of_columns,
    bias,
    out,
    n,
    product_row,
    rows_step,
    out_row,
    ROWED: tl.constexpr,
    COLUMNED: tl.constexpr,
    BIASED: tl.constexpr,
    THROUGH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """A program for COLUMNS elements of a row. What ROWED, COLUMNED and BIASED leave out is any pointer."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    x = tl.load(product + row * product_row + columns, mask=inside, other=0.0)
    if ROWED:
        x = x * tl.load(of_rows + row * rows_step)
    if COLUMNED:
        x = x * tl.load(of_columns + columns, mask=inside, other=0.0)
    if BIASED:
        x = x + widen(tl.load(bias + columns, mask=inside, other=0.0), HARDWARE)
    x = finish(x, THROUGH, 0.0, HARDWARE)
    tl.store(out + row * out_row + columns, x.to(out.dtype.element_ty), mask=inside)
