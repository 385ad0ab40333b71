"""Which kernel a call of an activation's operator takes, and what its launch covers. No GPU and no triton needed."""

import pytest
import torch
from torch import Tensor

import olq.ops  # noqa: F401  (registers the operators)
from olq import kernels
from olq.alloc.again import Form
from olq.alloc.outputs import fp8_group_output, mxfp8_output
from olq.kernels import plans, tiles
from olq.kernels.shapes import GRID, Plan

OPS = torch.ops.olq
pytestmark = pytest.mark.unaudited(reason="only shapes, strides and plans are looked at")


def meta(*shape: int, dtype=torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plan_of(operator: str, *args: object) -> Plan:
    found = plans.plan(operator, (*getattr(OPS, operator)(*args), *args))
    assert isinstance(found, Plan), found
    return found


X = meta(129, 1000)
SCALE_2 = meta(1, dtype=torch.float32)[0]
CALLS = {
    "fp8.quantize_rows": ("quantize_fp8_token", X),
    "fp8.quantize_groups": ("quantize_fp8_group", X, "row_major", 128),
    "activations.quantize_groups": ("quantize_fp8_group", X, "mn_major", 128),
    "activations.quantize_groups ": ("quantize_fp8_group", X, "row_major", 100),
    "activations.quantize_groups  ": ("silu_mul_quantize_fp8", X, X),
    "blockscaled.quantize_mxfp8": ("quantize_mxfp8", X, "swizzled_128x4"),
    "blockscaled.quantize_nvfp4": ("quantize_nvfp4", X, SCALE_2, "linear"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_its_kernel_which_the_table_names(name):
    (launch,) = plan_of(*CALLS[name]).launches
    assert launch.kernel == name.strip()
    assert name.strip() in kernels.table()


@pytest.mark.parametrize("layout", ["row_major", "mn_major", "ue8m0_words"])
@pytest.mark.parametrize("group", [1, 3, 16, 100, 128, 4096])
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (129, 1000), (4096, 8192), (70_000, 300)], ids=str)
@pytest.mark.parametrize("tall", [False, True])
def test_tiles_cover_rows_and_their_padding(layout, group, shape, tall):
    n, k = shape
    x = meta(k, n).t() if tall else meta(n, k)
    for args in ((x, x, layout, group), (x, layout, group)):
        operator = "silu_mul_quantize_fp8" if len(args) == 4 else "quantize_fp8_group"
        for launch in plan_of(operator, *args).launches:
            if launch.kernel != "activations.quantize_groups":
                continue
            c = launch.constants
            rows, units, lanes = c["ROWS"], c["UNITS"], c["LANES"]
            assert all(extent == tiles.power_of_two(extent) for extent in (rows, units, lanes))
            assert rows * units * lanes >= 128
            assert rows * units * lanes <= 128 * 32 * launch.warps
            assert not c["WORDS"] or units % 4 == 0
            across, down, _ = launch.grid
            assert down <= GRID
            assert down * rows >= (n if layout == "row_major" else -(-n // 4) * 4)
            assert (across - 1) * units * group < k <= across * units * group


def test_swizzled_scales_are_covered_up_to_128_by_4():
    for n, k in ((1, 32), (129, 1000), (127, 40)):
        for operator, block, rest in (("quantize_mxfp8", 32, ()), ("quantize_nvfp4", 16, (SCALE_2,))):
            (launch,) = plan_of(operator, meta(n, k), *rest, "swizzled_128x4").launches
            across, down, _ = launch.grid
            assert launch.constants["PADDED"]
            assert not launch.constants["FULL"]
            assert down * launch.constants["ROWS"] >= -(-n // 128) * 128
            assert across * launch.constants["COLUMNS"] // block >= -(-k // (4 * block)) * 4


def test_without_padding_nothing_is_masked_for_it():
    (launch,) = plan_of("quantize_mxfp8", meta(256, 1024), "swizzled_128x4").launches
    assert not launch.constants["PADDED"]
    assert launch.constants["FULL"]


def test_leading_dimensions_that_do_not_merge_go_to_the_reference():
    x = meta(4, 6, 8, 128)[::2, ::2]
    found = plans.plan("quantize_fp8_group", (*OPS.quantize_fp8_group(x, "mn_major"), x, "mn_major"))
    assert found == "the leading dimensions of its tensors can't be seen as one"


def test_nothing_is_renewed_that_was_never_launched():
    assert kernels.renew("quantize_fp8_token", (torch.zeros(2, 32), False)) is None


@pytest.mark.parametrize("rows", [4, 5])
def test_a_form_makes_the_like_of_what_was_made(rows):
    outputs = [*mxfp8_output(rows, 40, scale_layout="swizzled_128x4", device="cpu", owner="test")]
    for layout in ("row_major", "mn_major", "ue8m0_words"):
        outputs += fp8_group_output(rows, 300, scale_layout=layout, lead=(2,), device="cpu", owner="test")
    for made in outputs:
        again = Form(made).make(torch.device("cpu"))
        assert (again.shape, again.stride(), again.dtype) == (made.shape, made.stride(), made.dtype)
        assert again.untyped_storage().nbytes() == made.untyped_storage().nbytes()
        assert again._base is None
        assert again.data_ptr() != made.data_ptr()
