"""A product of codes becomes a product of values: scales of rows and columns, a bias, one rounding."""

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


def _check(
    product: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    name = "scale_product_"
    check_dtype(name, "product", product, torch.float32)
    if product.dim() != 2:
        fail(name, "product", f"shape {tuple(product.shape)}", "two dimensions")
    m, n = product.shape
    check_dtype(name, "out", out, *OUT_DTYPES)
    check_shape(name, "out", out, (m, n))
    check_same_device(name, product=product, out=out)
    for argument, scale, shape in (("of_rows", of_rows, (m, 1)), ("of_columns", of_columns, (1, n))):
        if scale is not None:
            check_dtype(name, argument, scale, torch.float32)
            check_shape(name, argument, scale, shape)
            check_same_device(name, product=product, scale=scale)
    check_bias(name, bias, n, out.dtype, product=product)


@operator(
    "Tensor product, Tensor? of_rows, Tensor? of_columns, Tensor? bias, Tensor(a!) out", _check, kernel=True
)
def scale_product_(
    product: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """`out = product * of_rows * of_columns + bias`, from left to right in float32, rounded once at the end.

    Args:
        product: float32 [M, N], any strides.
        of_rows: float32 [M, 1], or None for ones.
        of_columns: float32 [1, N], or None for ones.
        bias: [N] of the dtype of `out`, or None for no sum.
        out: bfloat16, float16 or float32 [M, N], written.
    """
    for scale in (of_rows, of_columns):
        if scale is not None:
            product = product * scale
    out.copy_(product if bias is None else product + bias)
