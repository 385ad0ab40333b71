"""A product of two FP8 matrices, quantized x and a quantized weight. No arithmetic.

    multiply_codes_fp8_(x, x_scale, codes, scale, bias, parts, starts, block_rows, block_columns, out!)

Value     out[m, j] = sum over k of x[m, k] * w[j, k], + bias[j]: both as their codes and scales say, exact products
          summed in float32, one rounding to the dtype of `out`
Letters   as in `olq.ops.linear`, whose arguments these are too but for

    x       uint8 [M, K], E4M3
    x_scale float32 decode scales: [1, 1] for all of x, [M, 1] for its rows, or, if the weight has units of
            `block_columns`, [M, ceil(K / block_columns)], any strides
    out     bfloat16, float16 or float32 [M, N], written
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from olq.ops.declare import (
    OUT_DTYPES,
    check_bias,
    check_dtype,
    check_same_device,
    check_shape,
    fail,
    operator,
)
from olq.ops.linear import check_rows_of_codes, check_scale_fp8


def _check(
    x: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    block_rows: int,
    block_columns: int,
    out: Tensor,
) -> None:
    name = "multiply_codes_fp8_"
    check_dtype(name, "x", x, torch.uint8)
    check_rows_of_codes(name, x, codes, parts, starts)
    check_scale_fp8(name, x, scale, parts, starts, block_rows, block_columns)
    check_dtype(name, "x_scale", x_scale, torch.float32)
    m, k = x.shape
    across = -(-k // block_columns) if block_columns else 1
    shapes = [(m, across)] if across != 1 else [(m, 1), (1, 1)]
    if tuple(x_scale.shape) not in shapes:
        fail(name, "x_scale", f"shape {tuple(x_scale.shape)}", " or ".join(map(str, shapes)))
    check_dtype(name, "out", out, *OUT_DTYPES)
    check_shape(name, "out", out, (m, sum(parts)))
    check_same_device(name, x=x, x_scale=x_scale, codes=codes, scale=scale, out=out)
    check_bias(name, bias, sum(parts), out.dtype, x=x)


@operator(
    "Tensor x, Tensor x_scale, Tensor codes, Tensor scale, Tensor? bias, int[] parts, int[] starts, int block_rows, "
    "int block_columns, Tensor(a!) out",
    _check,
    kernel=True,
)
def multiply_codes_fp8_(
    x: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    block_rows: int,
    block_columns: int,
    out: Tensor,
) -> None:
    """`X @ W.T + bias` into `out`; without a kernel both are decoded into float32, the weight in bands of rows."""
    m, k = x.shape
    values = torch.empty(m, k, dtype=torch.float32, device=x.device)
    across = x_scale.shape[1] > 1
    unit = (0 if x_scale.shape[0] == 1 != m else 1, block_columns if across else 0)
    torch.ops.olq.dequantize_fp8_(x, x_scale, values, *unit)
    added = None if bias is None else bias.float()
    rest = (list(parts), list(starts), block_rows, block_columns)
    out.copy_(torch.ops.olq.matmul_fp8(values, codes, scale, added, *rest))
