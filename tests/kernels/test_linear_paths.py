"""Which way a product goes, what its launches cover, and what the operators refuse. No GPU and no triton needed."""

import functools

import pytest
import torch
from kernels.linear_cases import FORMATS, Weight, make

from numerics.cases import OPS
from olq import kernels
from olq.errors import LayoutError
from olq.kernels import plan_shares, plans
from olq.kernels.shapes import SCRATCH, Plan

FORMS = pytest.mark.parametrize("form", FORMATS)


@functools.cache
def made(form: str, parts: tuple[int, ...], k: int) -> Weight:
    return make(form, list(parts), k, decode=False)


def plan(form: str, m: int, parts: list[int], k: int, dtype: torch.dtype = torch.bfloat16) -> Plan | str:
    weight = made(form, tuple(parts), k)
    x = torch.zeros(m, k, dtype=dtype)
    return plans.plan(weight.operator, (x.new_empty(m, sum(parts)), *weight.args(x, None)))


def rows_a_program(c: dict[str, object]) -> int:
    return c["BANDS"] * c["ROWS"] if "BANDS" in c else 16 * c["WARPS"]


@FORMS
@pytest.mark.parametrize("m", [1, 2, 5, 8, 13, 16, 17, 32, 33, 64, 65, 200, 256])
@pytest.mark.parametrize(("parts", "k"), [([40], 100), ([128, 256, 7], 4096), ([9000], 512)], ids=str)
def test_launches_cover_every_row_and_column_once(form, m, parts, k):
    found = plan(form, m, parts, k)
    assert isinstance(found, Plan), found
    *products, last = found.launches
    if last.kernel == "linear_wide.add":
        assert last.waits
        assert last.numbers[0] == sum(parts) <= last.grid[0] * last.constants["BLOCK"]
        assert last.grid[1] == m
        assert last.warps * 32 * 4 == last.constants["BLOCK"]  # 16 bytes of each share a thread
    else:
        products.append(last)
    covered = []
    for one in products:
        n, width, _, column = one.numbers[1:5]
        c, narrow = one.constants, one.kernel == "linear_small.product"
        assert width == k
        assert one.waits
        splits = c["SPLITS"] if narrow else c["SHARES"]
        programs, tokens, _ = one.grid
        if narrow:
            assert (tokens, one.warps) == (1, splits * c["BANDS"])
        else:
            assert programs % splits == 0
            assert one.warps == c["WARPS"]
            assert c["APART"] in (1, splits)
            programs //= splits
        assert programs * rows_a_program(c) >= n > (programs - 1) * rows_a_program(c)
        assert tokens * c["TOKENS"] >= m > (tokens - 1) * c["TOKENS"]
        assert c["TOKENS"] >= 8
        times = c["GROUPS"] if narrow else c["PIECES"]
        columns = c["PAIRS"] * times * (128 if c["E2M1"] else 64) * splits * c["STEPS"]
        assert columns >= k
        assert c["EVEN"] == (columns == k)
        covered += range(column, column + n)
    assert covered == list(range(sum(parts)))


SMALL, WIDE = "linear_small.product", "linear_wide.product"
BORDERS = {
    "fp8 channel": {
        4: (SMALL,),
        5: (WIDE, 8, True, True),
        32: (WIDE, 8, True, True),
        33: (WIDE, 8, False, False),
    },
    "fp8 block": {1: (WIDE, 8, True, True), 32: (WIDE, 8, True, True), 33: (WIDE, 8, False, True)},
    "mxfp8 linear": {
        8: (SMALL,),
        9: (WIDE, 8, True, True),
        32: (WIDE, 8, True, True),
        33: (WIDE, 8, False, False),
    },
    "nvfp4 linear": {
        2: (SMALL,),
        3: (WIDE, 8, False, False),
        16: (WIDE, 8, False, False),
        17: (WIDE, 16, False, False),
    },
}
"""By rows of x: kernel, and of `linear_wide` warps, whether it asks for a step ahead, whether shares take turns."""


@pytest.mark.parametrize(("form", "m"), [(form, m) for form, borders in BORDERS.items() for m in borders])
def test_rows_of_x_take_the_division_that_was_faster(form, m):
    found = plan(form, m, [8192], 4096)
    assert isinstance(found, Plan)
    first = found.launches[0]
    kernel, *division = BORDERS[form][m]
    assert first.kernel == kernel
    c = first.constants
    if division:
        assert c["SHARES"] > 1
        assert [c["WARPS"], c["AHEAD"], c["APART"] > 1] == division


@FORMS
@pytest.mark.parametrize("m", [9, 40, 100])
def test_shares_have_a_place_each_and_one_share_needs_none(form, m):
    for parts, k in (([128, 256, 16], 4096), ([48], 64)):
        found = plan(form, m, parts, k)
        assert isinstance(found, Plan)
        shares = [one.constants["SHARES"] for one in found.launches]
        width = sum(parts)
        if parts == [48]:
            assert shares == [1]
            assert found.scratch == 0
            assert SCRATCH not in found.launches[0].operands
            assert found.launches[0].numbers[-2:] == (width, 0)
        else:
            assert len(set(shares)) == 1 < shares[0]
            assert found.scratch == shares[0] * m * width
            assert all(one.operands[-1] == SCRATCH for one in found.launches[:-1])
            assert all(one.numbers[-2:] == (width, m * width) for one in found.launches[:-1])
            assert found.launches[-1].operands[0] == SCRATCH


def test_parts_with_one_scale_for_each_row_share_a_launch():
    for form, launches in (("fp8 channel", 1), ("mxfp8 linear", 1), ("fp8 tensor", 3), ("nvfp4 linear", 3)):
        found = plan(form, 1, [16, 32, 5], 256)
        assert isinstance(found, Plan)
        assert len(found.launches) == launches, form
    block = plan("fp8 block", 1, [128, 30, 128], 256)
    assert isinstance(block, Plan)
    *products, _ = block.launches
    assert [one.numbers[1] for one in products] == [158, 128]  # padding before the last


@FORMS
def test_what_has_no_kernel_says_why(form):
    limit = plan_shares.row_limit(form.split()[0])
    many = plan(form, limit + 1, [16], 256)
    assert many == f"x has {limit + 1} rows, and from {limit + 1} on decoded bands are faster"
    assert plan(form, 1, [16], 256, torch.float32) == "x is torch.float32, and tensor cores multiply 16 bits"
    assert plan(form, 0, [16], 256) == "there are no elements"


@FORMS
def test_a_bias_whose_elements_lie_apart_goes_the_other_way(form):
    weight, x = make(form, [16], 64), torch.zeros(1, 64, dtype=torch.bfloat16)
    out, long = x.new_empty(1, 16), x.new_zeros(40)
    for bias, apart in ((long[:32:2], 2), (long[:1].expand(16), 0)):
        found = plans.plan(weight.operator, (out, *weight.args(x, bias)))
        assert found == f"elements of the bias are {apart} apart, and it is read as if they lay side by side"
    for bias in (long[:16], long[3:19]):
        assert isinstance(plans.plan(weight.operator, (out, *weight.args(x, bias))), Plan)
    one = make(form, [1], 64)
    assert isinstance(plans.plan(one.operator, (out[:, :1], *one.args(x, long[:2:2]))), Plan)


def test_odd_codes_and_odd_units_go_the_other_way():
    weight = make("fp8 channel", [16], 256)
    x, out = torch.zeros(1, 250, dtype=torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16)
    codes, scale = weight.tensors
    args = (out, x, codes[:, 3:], scale, None, [16], [0], 1, 0)
    assert plans.plan("matmul_fp8", args) == "rows of codes can't be read eight bytes at a time"
    args = (out, x, codes, torch.ones(16, 2), None, [16], [0], 1, 192)
    assert isinstance(plans.plan("matmul_fp8", args), Plan)
    args = (out, x, codes, torch.ones(16, 6), None, [16], [0], 1, 48)
    assert plans.plan("matmul_fp8", args) == "a scale is for 48 columns, not for a multiple of 64"


@pytest.mark.parametrize("form", ["fp8 group", "mxfp8 linear", "nvfp4 linear"])
def test_columns_of_scales_that_lie_far_apart_go_the_other_way(form):
    weight = make(form, [16], 4096)
    codes, scale, *rest = weight.tensors
    x, out = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16)
    last = scale.shape[1] - 1
    for far in (True, False):
        stride = (1 << 31) // last + far
        apart = torch.empty_strided(scale.shape, (1, stride), dtype=scale.dtype, device="meta")
        args = (out, x, codes, apart, *rest, None, weight.parts, weight.starts, *weight.rest)
        found = plans.plan(weight.operator, args)
        assert found == "columns of its scales need 64 bits" if far else isinstance(found, Plan)


def test_a_product_on_a_cpu_goes_by_bands_and_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    weight = make("mxfp8 linear", [16], 64)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    found = str(kernels.path(weight.operator, x.new_empty(1, 16), *weight.args(x, None)))
    assert found.startswith("matmul_mxfp8: decoded bands and torch.mm, because ")
    codes, one = torch.zeros(1, 64, dtype=torch.uint8), torch.ones(1, 1)
    args = (codes, one, codes, one, None, [1], [0], 1, 0, torch.empty(1, 1))
    found = str(kernels.path("multiply_codes_fp8_", *args))
    assert found.startswith("multiply_codes_fp8_: decoded bands and torch.mm, because ")


@FORMS
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operators_are_well_formed(form, m, dtype):
    weight = make(form, [7, 40], 100)
    x, bias = torch.randn(m, 100).to(dtype), torch.randn(47).to(dtype)
    args = weight.args(x, bias)
    torch.library.opcheck(getattr(OPS, weight.operator).default, args)
    y = getattr(OPS, weight.operator)(*args)
    w = weight.as_dtype(dtype)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, bias), rtol=1e-2, atol=1e-3)


def test_no_rows_and_no_columns_of_a_weight():
    x = torch.randn(3, 0, dtype=torch.bfloat16)
    codes, scale = torch.zeros(16, 16, dtype=torch.uint8), torch.ones(16, 1)
    y = OPS.matmul_fp8(x, codes, scale, torch.ones(5, dtype=torch.bfloat16), [5], [0], 1, 0)
    assert y.eq(1).all()
    assert OPS.matmul_fp8(torch.zeros(2, 16), codes, scale, None, [], [], 1, 0).shape == (2, 0)
    assert OPS.matmul_fp8(torch.zeros(2, 16), codes, scale, None, [0, 3], [0, 4], 1, 0).shape == (2, 3)


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_does_not_change_an_operator(form, dtype):
    weight = make(form, [7, 40], 100)
    x, operator = torch.randn(3, 100).to(dtype), getattr(OPS, weight.operator)
    want = operator(*weight.args(x, None))
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(operator(*weight.args(x, None)), want)


REFUSED = {
    "shape (16, 16)": lambda x, c, s: OPS.matmul_fp8(x, c[:, :16], s, None, [16], [0], 1, 0),
    "at least 64 columns, for the 64 of x": lambda x, c, s: OPS.matmul_fp8(
        x, c[:, :16], s, None, [16], [0], 1, 0
    ),
    "parts within the 16 rows of codes": lambda x, c, s: OPS.matmul_fp8(x, c, s, None, [16], [1], 1, 0),
    "as many starts as parts": lambda x, c, s: OPS.matmul_fp8(x, c, s, None, [16], [], 1, 0),
    "shape (2,)": lambda x, c, s: OPS.matmul_fp8(x, c, s, None, [8, 8], [0, 8], 0, 0),
    "multiples of 128, the rows of a block": lambda x, c, s: OPS.matmul_fp8(x, c, s, None, [8], [8], 128, 0),
    "shape (16,)": lambda x, c, s: OPS.matmul_fp8(x, c, s, torch.zeros(3), [16], [0], 1, 0),
    "torch.float32 or torch.bfloat16 or torch.float16": (
        lambda x, c, s: OPS.matmul_fp8(x.double(), c, s, None, [16], [0], 1, 0)
    ),
    "two dimensions": lambda x, c, s: OPS.matmul_fp8(x[0], c, s, None, [16], [0], 1, 0),
}


@pytest.mark.parametrize("needed", REFUSED)
def test_arguments_that_do_not_fit_are_refused(needed):
    x, codes, scale = torch.zeros(2, 64), torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1)
    with pytest.raises(LayoutError) as error:
        REFUSED[needed](x, codes, scale)
    assert needed in str(error.value)
