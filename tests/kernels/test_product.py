"""The scaling of a product: the kernel's bytes are the reference's, and the reference's are those of named steps."""

import ml_dtypes
import numpy as np
import pytest
import torch
from kernels.compare import DEVICES, FLOATS, difference
from torch import Tensor

import olq.ops  # noqa: F401  (registers the operators)
from numerics.cases import OPS
from olq import kernels
from olq.errors import LayoutError

NUMPY = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}
PLAIN = {
    "product": torch.zeros(3, 4),
    "of_rows": None,
    "of_columns": None,
    "bias": None,
    "out": torch.zeros(3, 4),
}
PARTS = [(r, c, b) for r in (False, True) for c in (False, True) for b in (False, True)]


def arguments(m: int, n: int, dtype: torch.dtype, rows: bool, columns: bool, bias: bool):
    """With values that overflow, underflow, tie and are no numbers."""
    generator = torch.Generator().manual_seed(m * n)
    product = torch.randn(m, n + 3, generator=generator)[:, :n] * 300
    product[0, 0], product[-1, -1] = torch.inf, torch.nan
    of_rows = torch.exp2(torch.randint(-30, 8, (m, 1), generator=generator).float()) * 1.7
    of_columns = torch.exp2(torch.randint(-9, 9, (1, n), generator=generator).float()) * 1.3
    offset = torch.randn(n, generator=generator).to(dtype)
    optional = (of_rows if rows else None, of_columns if columns else None, offset if bias else None)
    return product, *optional, torch.zeros(m, n, dtype=dtype)


def same(found: Tensor, want: Tensor) -> bool:
    """Equal, a NaN to a NaN of any bits."""
    return torch.equal(found.isnan(), want.isnan()) and torch.equal(found.nan_to_num(0), want.nan_to_num(0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_reference_is_the_named_steps(parts, dtype):
    product, of_rows, of_columns, bias, out = arguments(5, 300, dtype, *parts)
    OPS.scale_product_(product, of_rows, of_columns, bias, out)
    with np.errstate(all="ignore"):
        want = product.numpy()
        for scale in (of_rows, of_columns):
            want = want if scale is None else want * scale.numpy()
        want = want if bias is None else want + bias.float().numpy()
        assert want.dtype == np.float32
        want = torch.from_numpy(want.astype(NUMPY[dtype]).astype(np.float32)).to(dtype)
    assert same(out, want)


@DEVICES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 255), (2, 300)], ids=str)
def test_the_kernel_has_the_bytes_of_the_reference(device, shape, parts, dtype):
    product, *rest, out = arguments(*shape, dtype, *parts)
    finite = product.nan_to_num(0.5, 1.0)  # bits of a NaN are nobody's
    assert difference("scale_product_", (finite, *rest, out), device) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"product": torch.zeros(0, 4), "out": torch.zeros(0, 4)}, "there are no elements"),
        ({"product": torch.zeros(4, 3).t()}, "columns of a tensor are not next to each other"),
        ({"product": torch.zeros(65536, 1), "out": torch.zeros(65536, 1)}, "65536 rows, more than 65535"),
    ],
)
def test_a_call_without_a_kernel_says_why(monkeypatch, change, reason):
    monkeypatch.setattr(kernels, "unavailable", lambda args: None)
    assert reason in kernels.path("scale_product_", *(PLAIN | change).values()).reason


@pytest.mark.parametrize(
    ("change", "argument", "need"),
    [
        ({"product": torch.zeros(3, 4, dtype=torch.float16)}, "product", "torch.float32"),
        ({"product": torch.zeros(3)}, "product", "two dimensions"),
        ({"of_rows": torch.zeros(3)}, "of_rows", "shape (3, 1)"),
        ({"of_columns": torch.zeros(4, 1)}, "of_columns", "shape (1, 4)"),
        ({"bias": torch.zeros(4, dtype=torch.float16)}, "bias", "torch.float32"),
        ({"out": torch.zeros(3, 4, dtype=torch.float64)}, "out", "torch.float32 or"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, argument, need):
    with pytest.raises(LayoutError, match=f"scale_product_ can't take this {argument}") as raised:
        OPS.scale_product_(*(PLAIN | change).values())
    assert need in raised.value.need
