"""Products with quantized weights against NumPy's oracles: one-hot rows give the weight, sums err as float32 sums do.

On a CPU the kernels run under Triton's interpreter, in a process of their own (test_interpreter).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.compare import DEVICES, INTERPRETED, cases
from kernels.linear_cases import FORMATS, Weight, largest_error, make, product
from kernels.loads import show_loads
from torch.nn import functional

from olq import kernels
from olq.kernels import launching, plan_shares, plans
from olq.kernels.shapes import Plan

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
FORMS = pytest.mark.parametrize("form", FORMATS)
ROWS = pytest.mark.parametrize("rows", [2, 3, 16])
"""Of x. `linear_small` takes 2, and 3 but for nvfp4, never fp8 with scales of some columns; `linear_wide` the rest."""


def takes(weight: Weight, x: torch.Tensor, form: str) -> bool:
    """Whether x goes to the kernel that its number of rows is there for."""
    plan = plans.plan(weight.operator, (x.new_empty(len(x), sum(weight.parts)), *weight.args(x, None)))
    assert isinstance(plan, Plan)
    k = x.shape[1]
    columns = {"fp8 block": 128, "fp8 group": 64, "fp8 columns": 64}.get(form, k)  # of a scale
    small = len(x) <= (2 if form.startswith("nvfp4") else 4) and columns >= k
    return plan.launches[0].kernel == ("linear_small.product" if small else "linear_wide.product")


def same(y: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits; zeros have no sign, since a sum begins with +0."""
    return torch.equal((y + 0.0).view(torch.int16), (want + 0.0).view(torch.int16))


def one_hot(columns: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.zeros(len(columns), k, dtype=dtype)
    x[torch.arange(len(columns)), columns] = 1.0
    return x


@DEVICES
@DTYPES
@FORMS
@ROWS
@pytest.mark.parametrize(("parts", "k"), [([20], 100), ([7, 40, 3], 257), ([130], 512)], ids=str)
def test_one_hot_rows_give_the_decoded_weight(form, parts, k, rows, dtype, device):
    weight = make(form, parts, k)
    w = weight.as_dtype(dtype)
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    for some in columns[: k // rows * rows].split(rows)[: 1 if device == "cpu" else None]:
        x = one_hot(some, k, dtype)
        assert takes(weight, x, form)
        assert same(product(weight, x, None, device), w[:, some].T)


STEPS = [(form, rows, k) for form in FORMATS for rows, k in ((9, 700), (40, 512))]
STEPS += [
    ("nvfp4 linear", 20, 512),
    ("nvfp4 linear", 4, 2048),
    ("mxfp8 linear", 8, 2048),
    *((form, 2, 2048) for form in ("fp8 channel", "mxfp8 linear", "nvfp4 linear")),
]


@pytest.mark.parametrize(("form", "rows", "k", "device"), cases(STEPS, FORMATS, (2, 9, 20, 40), (2048, 2100)))
def test_steps_of_a_program_follow_each_other(form, rows, k, device, monkeypatch):
    for limit in ("_MOST_SHARES", "_WARPS", "_MANY"):  # else each step would be another program's or warp's
        monkeypatch.setattr(plan_shares, limit, 1)
    weight = make(form, [24], k)
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(2))[:rows]
    columns[-1] = k - 1
    x = one_hot(columns, k, torch.bfloat16)
    plan = plans.plan(weight.operator, (x.new_empty(rows, 24), *weight.args(x, None)))
    assert isinstance(plan, Plan)
    assert plan.launches[0].constants["STEPS"] > 1
    assert same(product(weight, x, None, device), weight.as_dtype(torch.bfloat16)[:, columns].T)


TURNS = [("fp8 channel", 9), ("fp8 channel", 20), ("fp8 block", 20), ("fp8 group", 40)]
TURNS += [("mxfp8 linear", 9), ("mxfp8 swizzled_128x4", 20)]


@pytest.mark.parametrize(
    ("form", "rows", "device"), cases(TURNS, ("fp8 block", "fp8 group", "fp8 columns"), (9, 20, 40))
)
@pytest.mark.parametrize("k", [1157, 1536])
def test_shares_that_take_turns_have_each_column_once(form, rows, k, device, monkeypatch):
    monkeypatch.setattr(plan_shares, "_MOST_SHARES", 4)
    weight = make(form, [24], k)
    columns = torch.arange(rows) * (k - 1) // (rows - 1)  # the first and the last, and some of each step
    x = one_hot(columns, k, torch.bfloat16)
    plan = plans.plan(weight.operator, (x.new_empty(rows, 24), *weight.args(x, None)))
    assert isinstance(plan, Plan)
    constants = plan.launches[0].constants
    assert constants["APART"] == constants["SHARES"] == 4
    assert constants["STEPS"] > 2
    assert same(product(weight, x, None, device), weight.as_dtype(torch.bfloat16)[:, columns].T)


@DEVICES
@FORMS
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_sums_err_no_more_than_float32_sums(form, device, data):
    parts = data.draw(st.lists(st.sampled_from([1, 2, 5, 16, 33, 130]), min_size=1, max_size=3))
    k = data.draw(st.sampled_from([1, 2, 31, 32, 100, 129, 256, 300, 640, 1100]))
    m = data.draw(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 16, 17, 40, 70]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    weight = make(form, parts, k, seed=data.draw(st.integers(0, 9)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    x = torch.randn(m, k, generator=generator).to(dtype)
    way = data.draw(st.sampled_from(["dense", "columns", "rows", "steps"]))
    if way == "columns":
        x = x.t().contiguous().t()
    elif way == "rows":
        x = torch.randn(m, k + 3, generator=generator).to(dtype)[:, 1 : k + 1]
    elif way == "steps":
        x = torch.randn(m, 2 * k, generator=generator).to(dtype)[:, ::2]
    n, bias = sum(parts), torch.randn(2 * sum(parts), generator=generator).to(dtype)
    ways = {"none": None, "dense": bias[:n], "steps": bias[::2], "one": bias[:1].expand(n)}
    bias = ways[data.draw(st.sampled_from(sorted(ways)))]
    y = product(weight, x, bias, device)
    assert y.shape == (m, sum(parts))
    assert largest_error(y, x, weight.operand(x, bias), bias) <= weight.allowed(x, bias, device)


@DEVICES
@FORMS
@pytest.mark.parametrize("rows", [4, 12])
def test_infinities_and_nans_of_x_spread_as_in_linear(form, rows, device):
    weight = make(form, [40], 288)
    w = weight.as_dtype(torch.bfloat16)
    x = torch.randn(rows, 288, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3], x[1, 7], x[2, 9], x[2, 200], x[3, 287] = torch.nan, torch.inf, torch.inf, -torch.inf, -torch.inf
    y, want = product(weight, x, None, device).float(), functional.linear(x.float(), w.float())
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.isinf(), want.isinf())
    assert torch.equal(y[y.isinf()], want[want.isinf()])


def spoiled(weight: Weight, which: int, row: int, column: int, value: float) -> Weight:
    tensors = [t.clone() for t in weight.tensors]
    tensors[which][row, column] = value
    return Weight(weight.operator, tuple(tensors), weight.parts, weight.starts, weight.rest, weight.decoded)


@DEVICES
@pytest.mark.parametrize(
    ("form", "which", "value"),
    [
        ("fp8 channel", 0, 0x7F),
        ("fp8 channel", 1, torch.nan),
        ("mxfp8 linear", 0, 0xFF),
        ("mxfp8 linear", 1, 255),
        ("nvfp4 linear", 1, 0x7F),
    ],
)
@ROWS
def test_a_code_or_scale_that_is_no_number_spoils_its_row_and_no_other(form, which, value, rows, device):
    weight = spoiled(make(form, [40], 256), which, 17, 0, value)
    y = product(weight, torch.ones(rows, 256, dtype=torch.bfloat16), None, device)
    spoilt = y.isnan().any(0)
    assert spoilt.nonzero().flatten().tolist() == [17]
    assert y[:, 17].isnan().all()


@DEVICES
@ROWS
@pytest.mark.parametrize("byte", [0, 1, 127, 253, 254])
def test_the_ends_of_e8m0(byte, rows, device):
    weight = make("mxfp8 linear", [16], 64)
    tensors = (weight.tensors[0], torch.full_like(weight.tensors[1], byte))
    w = torch.empty(16, 64, dtype=torch.bfloat16)
    torch.ops.olq.dequantize_mxfp8_(weight.tensors[0][:16, :64], tensors[1], w, "linear", 0, 1, 0)
    weight = Weight(weight.operator, tensors, [16], [0], weight.rest, weight.decoded)
    y = product(weight, one_hot(torch.arange(rows), 64, torch.bfloat16), None, device)
    finite = w[:, :rows].isfinite().T & w.isfinite().all(1)  # 0 * infinity is no number
    assert same(torch.where(finite, y, 0), torch.where(finite, w[:, :rows].T, 0))


@DEVICES
@pytest.mark.parametrize("s2", [2.0**-149, 2.0**-130, 2.0**-117, 2.0**100, 2.0**118])
@DTYPES
@ROWS
def test_tensor_scales_of_any_size(s2, rows, dtype, device):
    weight = make("nvfp4 linear", [16], 64)
    tensors = (*weight.tensors[:2], torch.tensor([s2]))
    w = torch.empty(16, 64, dtype=dtype)
    torch.ops.olq.dequantize_nvfp4_(weight.tensors[0], tensors[1], tensors[2][0], w, "linear", 0, 1, 0)
    weight = Weight(weight.operator, tensors, [16], [0], weight.rest, weight.decoded)
    y = product(weight, one_hot(torch.arange(rows), 64, dtype), None, device)
    finite = w[:, :rows].isfinite().T & w.isfinite().all(1)
    assert same(torch.where(finite, y, 0), torch.where(finite, w[:, :rows].T, 0))


SCALED = ("fp8 tensor", "fp8 channel", "fp8 block", "fp8 group", "nvfp4 linear")
INFINITE = [
    (form, 0, m, k)
    for form in SCALED
    for m, k in ((1, 300), (1, 2100), (9, 300), (9, 1100), (20, 300), (20, 1100))
]
INFINITE += [(form, -1, m, k) for form in ("fp8 channel", "fp8 block") for m, k in ((9, 300), (40, 192))]
INFINITE += [("fp8 group", -1, m, k) for m, k in ((1, 300), (9, 300), (20, 300), (20, 1100), (40, 192))]


@pytest.mark.parametrize(
    ("form", "which", "m", "k", "device"),
    cases(INFINITE, SCALED, (0, -1), (1, 9, 20, 40), (192, 300, 2100)),
)
def test_an_infinite_scale_gives_infinite_sums(form, m, k, which, device):
    """Of the last columns too, where steps of a program may lie beyond them."""
    weight = make(form, [16], k)
    *inner, last = (t.clone() for t in weight.tensors)
    if form == "nvfp4 linear":
        inner[0][:], inner[1][:], last[:] = 0x22, 0x38, torch.inf  # codes of 1, scales of 1
    else:
        inner[0][:], last[:] = 0x38, 1.0
        last.view(-1)[which] = torch.inf
    weight = Weight(weight.operator, (*inner, last), [16], [0], weight.rest, weight.decoded)
    y = product(weight, torch.ones(m, k, dtype=torch.bfloat16), None, device)
    rows = slice(0, 16)
    if form in ("fp8 channel", "fp8 group"):
        rows = slice(0, 1) if which == 0 else slice(15, 16)
    assert y[:, rows].isposinf().all()
    others = torch.ones(16, dtype=torch.bool)
    others[rows] = False
    assert y[:, others].eq(torch.tensor(k, dtype=torch.bfloat16)).all()


@DEVICES
@pytest.mark.parametrize(("unit", "k", "m"), [(128, 192, 40), (128, 300, 40), (256, 384, 9), (192, 448, 9)])
def test_a_unit_of_columns_may_end_before_a_programs_steps(unit, k, m, device):
    codes = torch.full((16, -(-k // 64) * 64), 0x38, dtype=torch.uint8)  # ones
    scale = torch.ones(16, -(-k // unit))
    scale[3, -1] = torch.inf
    weight = Weight("matmul_fp8", (codes, scale), [16], [0], (1, unit), np.ones((16, k), np.float32))
    y = product(weight, torch.ones(m, k, dtype=torch.bfloat16), None, device)
    assert y[:, 3].isposinf().all()
    assert y[:, torch.arange(16) != 3].eq(torch.tensor(k, dtype=torch.bfloat16)).all()


@INTERPRETED
@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("form", ["fp8 channel", "nvfp4 linear"])
@pytest.mark.parametrize("device", ["cpu"])
def test_lines_of_codes_and_no_others_are_asked_for_before_the_wait(form, device, m, monkeypatch):
    from olq.kernels import linear_small, linear_weights, linear_wide

    order, asked, settings = [], [], launching.settings

    def record(text, constraints, args, **rest):
        order.append("ask")
        at, there = (a.handle.data for a in args)
        asked.append(at[there != 0].astype(np.int64))

    def interpretable(one, at):
        return {name: value for name, value in settings(one, at).items() if name != "launch_pdl"}

    monkeypatch.setattr(launching, "_early", lambda device: True)
    monkeypatch.setattr(launching, "settings", interpretable)
    for module in (linear_small, linear_wide):
        monkeypatch.setattr(module, "gdc_wait", lambda **rest: order.append("wait"))
        monkeypatch.setattr(module, "gdc_launch_dependents", lambda **rest: order.append("next"))
    monkeypatch.setattr(linear_weights.tl, "inline_asm_elementwise", record)
    show_loads(monkeypatch, lambda pointers, mask: order.append("load"))
    weight = make(form, [40], 1060)
    inner, *rest = weight.tensors
    codes = torch.zeros(len(inner), 4096, dtype=torch.uint8)[:, -inner.shape[1] :]
    codes.copy_(inner)
    args = (torch.ones(m, 1060, dtype=torch.bfloat16), codes, *rest, None, [40], [0], *weight.rest)
    assert kernels.launch(weight.operator, args, (torch.empty(m, 40, dtype=torch.bfloat16),))
    order = [what for what, before in zip(order, [None, *order], strict=False) if what != before]
    sums = m if m > 8 else 0
    # linear_wide is faster without asking for E2M1 codes.
    first = [] if form == "nvfp4 linear" and sums else ["ask"]
    programs = order.count("next") - sums
    assert programs > 0
    each = ["wait", "load", "next", "load"] if sums else ["wait", "next", "load"]
    assert order == [*first, *each] * programs + ["next", "wait", "load"] * sums
    if first:
        row, column = np.divmod(np.concatenate(asked) - codes.data_ptr(), 4096)
        assert set(row) == set(range(40))
        assert 0 <= column.min() <= column.max() < (1060 if form == "fp8 channel" else 530)
    if sums and first:  # shares take turns, of 128 columns, which are a line
        assert set(column) == {128 * share for share in range(programs)}


@DEVICES
def test_decoders_of_the_oracle_and_of_the_product_are_the_same(device):
    # Every E4M3 code with one scale, every pair of E2M1 codes with every scale byte.
    codes = np.arange(256, dtype=np.uint8)
    every = make("fp8 channel", [256], 64)
    tensors = (torch.from_numpy(np.repeat(codes[:, None], 64, 1)), torch.full((256, 1), 1.0))
    weight = Weight(every.operator, tensors, [256], [0], every.rest, every.decoded)
    y = product(weight, one_hot(torch.tensor([5]), 64, torch.bfloat16), None, device)[0]
    number = torch.from_numpy(codes & 0x7F != 0x7F)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert same(y[number], want[number])
    assert y[~number].isnan().all()
