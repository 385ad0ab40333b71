"""A Triton producer for the audit's tests. Importing it needs Triton."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_rows(x_ptr, out_ptr, columns, step, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    tl.store(out_ptr + row * step + at, tl.load(x_ptr + row * columns + at, mask=inside), mask=inside)


def copy_rows(x: Tensor, out: Tensor, rows: int) -> None:
    """Copy the first `rows` rows of x, [M, K] contiguous, into out, 16 columns a program."""
    grid = (rows, triton.cdiv(x.shape[1], 16))
    _copy_rows[grid](x, out, x.shape[1], out.stride(0), BLOCK=16)
