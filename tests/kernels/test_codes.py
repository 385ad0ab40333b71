"""Products of codes by codes against float64: exact where one column counts, within float32 sums elsewhere.

On a CPU the kernel runs under Triton's interpreter, in a process of its own (test_interpreter).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.compare import DEVICES, like
from kernels.linear_cases import Weight, largest_error, make
from torch import Tensor

from numerics.cases import OPS
from olq import kernels
from olq.errors import LayoutError
from olq.kernels import plan_shares, plans
from olq.kernels.shapes import Plan
from oracles import fp8

WAYS = {
    "fp8 tensor": "tensor",
    "fp8 channel": "token",
    "fp8 block": "group",
    "fp8 group": "group",
    "fp8 columns": "group",
}
FORMS = pytest.mark.parametrize("form", WAYS)
LIMIT = plan_shares.row_limit("fp8 codes")


def quantized(form: str, m: int, k: int, columns: int, weight: Weight, seed: int) -> tuple[Tensor, ...]:
    """Finite codes [m, columns] with zeros from k on, their scales, and the values they stand for, float32 [m, k]."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, (m, columns), dtype=np.uint8)
    codes = np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)
    codes[:, k:] = 0
    width = weight.rest[1] if WAYS[form] == "group" else 0
    unit = (0 if WAYS[form] == "tensor" else 1, width)
    shape = (1 if WAYS[form] == "tensor" else m, -(-columns // width) if width else 1)
    scale = (generator.random(shape) + 0.5).astype(np.float32)
    values = fp8.dequantize(codes, scale, unit)[:, :k] if m else np.zeros((0, k), np.float32)
    if WAYS[form] == "group":  # columns of scales lie side by side, as the activation quantizer leaves them
        return torch.from_numpy(codes), torch.from_numpy(scale.T.copy()).t(), torch.from_numpy(values)
    return torch.from_numpy(codes), torch.from_numpy(scale), torch.from_numpy(values)


def call(weight: Weight, x: Tensor, s: Tensor, bias: Tensor | None, out: Tensor) -> tuple[object, ...]:
    return (x, s, *weight.tensors, bias, weight.parts, weight.starts, *weight.rest, out)


def product(weight: Weight, x: Tensor, s: Tensor, bias: Tensor | None, dtype: torch.dtype, device: str):
    """By the kernel on a CPU, interpreted; on a GPU by the operator, twice."""
    out = torch.full((len(x), sum(weight.parts)), torch.nan, dtype=dtype)
    args = [like(a, device) if isinstance(a, Tensor) else a for a in call(weight, x, s, bias, out)]
    if device == "cpu":
        with np.errstate(all="ignore"):
            if not kernels.launch("multiply_codes_fp8_", tuple(args)):
                OPS.multiply_codes_fp8_(*args)
        return out
    OPS.multiply_codes_fp8_(*args)
    first = args[-1].cpu()
    args[-1].fill_(torch.nan)
    OPS.multiply_codes_fp8_(*args)
    assert torch.equal(first.view(torch.uint8), args[-1].cpu().view(torch.uint8)), "two calls differ"
    return first


@DEVICES
@FORMS
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_sums_err_no_more_than_float32_sums(form, device, data):
    parts = data.draw(st.lists(st.sampled_from([1, 2, 5, 16, 33, 130]), min_size=1, max_size=3))
    k = data.draw(st.sampled_from([1, 16, 31, 100, 129, 256, 300, 640]))
    m = data.draw(st.sampled_from([0, 1, 2, 3, 7, 8, 9, 16, 17]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    weight = make(form, parts, k, seed=data.draw(st.integers(0, 9)))
    x, s, values = quantized(form, m, k, weight.tensors[0].shape[1], weight, data.draw(st.integers(0, 9)))
    # Padding of a weight's codes is poison in these cases: it must be a number where x has codes, which are zeros.
    weight.tensors[0][:, k:] = 0
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    bias = torch.randn(sum(parts), generator=generator).to(dtype) if data.draw(st.booleans()) else None
    y = product(weight, x, s, bias, dtype, device)
    assert y.shape == (m, sum(parts))
    assert largest_error(y, values, torch.from_numpy(weight.decoded), bias) <= 1.0


@DEVICES
@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_column_gives_the_product_of_two_values(form, dtype, device):
    weight = make(form, [40, 3], 256)
    columns = torch.randperm(256, generator=torch.Generator().manual_seed(2))[:LIMIT]
    x = torch.zeros(LIMIT, 256, dtype=torch.uint8)
    x[torch.arange(LIMIT), columns] = 0x38  # 1
    across = -(-256 // weight.rest[1]) if weight.rest[1] else 1
    s = torch.ones(LIMIT, across) if WAYS[form] != "tensor" else torch.ones(1, 1)
    y = product(weight, x, s, None, dtype, device)
    want = torch.from_numpy(weight.decoded).to(dtype)[:, columns].T
    assert torch.equal((y + 0.0).view(torch.int16), (want + 0.0).view(torch.int16))


@DEVICES
@FORMS
def test_what_is_no_number_spoils_its_row_or_column_and_no_other(form, device):
    weight = make(form, [40], 256)
    weight.tensors[0][17, 3] = 0xFF
    x, s, _ = quantized(form, 5, 256, 256, weight, 1)
    x[2, 200] = 0x7F
    spoilt = product(weight, x, s, None, torch.bfloat16, device).isnan()
    want = torch.zeros(5, 40, dtype=torch.bool)
    want[2], want[:, 17] = True, True
    assert torch.equal(spoilt, want)


NAMES = ("x", "x_scale", "codes", "scale", "bias", "parts", "starts", "block_rows", "block_columns", "out")


def changed(
    form: str, m: int = 3, dtype: torch.dtype = torch.bfloat16, **change: object
) -> tuple[object, ...]:
    """Arguments of a call with 40 rows of W and 256 columns, some of them other ones."""
    weight = make(form, [40], 256)
    x, s, _ = quantized(form, m, 256, 256, weight, 1)
    args = call(weight, x, s, None, torch.empty(m, 40, dtype=dtype))
    return tuple((dict(zip(NAMES, args, strict=True)) | change).values())


def plan(form: str, *args: object, **change: object) -> Plan | str:
    return plans.plan("multiply_codes_fp8_", changed(form, *args, **change))


@DEVICES
@pytest.mark.parametrize("side", ["weight", "x"])
@pytest.mark.parametrize(("unit", "k", "m"), [(256, 384, 1), (256, 384, 9), (192, 320, 9), (256, 520, 9)])
def test_a_unit_of_columns_may_end_before_a_warps_steps(unit, k, m, side, device):
    columns, units = -(-k // 64) * 64, -(-k // unit)
    codes = torch.full((16, columns), 0x38, dtype=torch.uint8)  # ones
    x, scale, s = codes[:1].repeat(m, 1)[:, :k], torch.ones(16, units), torch.ones(m, units)
    (scale if side == "weight" else s)[0, -1] = torch.inf
    weight = Weight("", (codes, scale), [16], [0], (1, unit), np.ones((16, k), np.float32))
    y = product(weight, x, s, None, torch.bfloat16, device)
    infinite = torch.zeros(m, 16, dtype=torch.bool)
    infinite[(slice(None), 0) if side == "weight" else (0, slice(None))] = True
    assert torch.equal(y.isposinf(), infinite)
    assert y[~infinite].eq(torch.tensor(k, dtype=torch.bfloat16)).all()


@FORMS
def test_what_has_no_kernel_says_why(form):
    assert isinstance(plan(form), Plan)
    assert (
        plan(form, LIMIT + 1) == f"x has {LIMIT + 1} rows, and from {LIMIT + 1} on torch's product is faster"
    )
    assert plan(form, dtype=torch.float32) == "the result is float32, and the kernel writes 16 bits"
    assert plan(form, 0) == "there are no elements"
    odd = torch.zeros(3, 300, dtype=torch.uint8)[:, 3:259]
    assert plan(form, x=odd) == "rows of x can't be read eight bytes at a time"
    wide = torch.empty(3, 80, dtype=torch.bfloat16)[:, ::2]
    assert plan(form, out=wide) == "columns of the result are not next to each other"
    apart = torch.empty_strided((3, 5), (1, 1 << 29), device="meta")
    assert plan(form, x_scale=apart) == "columns of its scales need 64 bits"
    assert plan(form, block_columns=48) == "a scale is for 48 columns, not for a multiple of 64"


@FORMS
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_operator_is_well_formed(form, m, dtype):
    weight = make(form, [7, 40], 128)
    x, s, values = quantized(form, m, 128, 128, weight, 0)
    bias, out = torch.randn(47).to(dtype), torch.empty(m, 47, dtype=dtype)
    torch.library.opcheck(OPS.multiply_codes_fp8_.default, call(weight, x, s, bias, out))
    OPS.multiply_codes_fp8_(*call(weight, x, s, bias, out))
    assert largest_error(out, values, torch.from_numpy(weight.decoded), bias) <= 1.0


REFUSED = {
    "torch.uint8": {"x": torch.zeros(3, 256)},
    "(3, 1) or (1, 1)": {"x_scale": torch.ones(3, 2)},
    "torch.float32": {"x_scale": torch.ones(3, 1).half()},
    "(3, 40)": {"out": torch.empty(3, 41)},
    "at least 256 columns, for the 256 of x": {"codes": torch.zeros(48, 240, dtype=torch.uint8)},
    "torch.bfloat16": {"bias": torch.zeros(40)},
}


@pytest.mark.parametrize("needed", REFUSED)
def test_arguments_that_do_not_fit_are_refused(needed):
    with pytest.raises(LayoutError, match="multiply_codes_fp8_ can't take this") as error:
        OPS.multiply_codes_fp8_(*changed("fp8 channel", **REFUSED[needed]))
    assert needed in str(error.value)
