"""The launch for `scale_product_`."""

import torch
from torch import Tensor

from olq.kernels.shapes import GRID, Launch, Plan

_COLUMNS = 256
"""16 bytes of float32 for each thread of two warps: a call has few rows, and wants many programs."""
_THROUGH = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: ""}


def scale_product(
    product: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, bias: Tensor | None, out: Tensor
) -> Plan | str:
    """For `olq.ops.product.scale_product_`, whose arguments these are."""
    m, n = product.shape
    if not (m and n):
        return "there are no elements"
    if m > GRID:
        return f"there are {m} rows, more than {GRID}"
    along = (product, out, *(t for t in (of_columns, bias) if t is not None))
    if n > 1 and any(t.stride(-1) != 1 for t in along):
        return "columns of a tensor are not next to each other"
    given = [t for t in (product, of_rows, of_columns, bias, out) if t is not None]
    places = {id(t): i for i, t in enumerate(given)}
    operands = tuple(0 if t is None else places[id(t)] for t in (product, of_rows, of_columns, bias, out))
    one = Launch(
        "product.scale_product",
        operands,
        (n, product.stride(0), 0 if of_rows is None else of_rows.stride(0), out.stride(0)),
        {
            "ROWED": of_rows is not None,
            "COLUMNED": of_columns is not None,
            "BIASED": bias is not None,
            "THROUGH": _THROUGH[out.dtype],
            "COLUMNS": _COLUMNS,
        },
        (-(-n // _COLUMNS), m, 1),
        2,
    )
    return Plan((one,))
