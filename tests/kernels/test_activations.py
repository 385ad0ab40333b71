"""Kernels for activations write the bytes of the reference: each operator, layout, dtype, shape and stride.

Outputs are compared as whole storages, and start as poison, padding included: a kernel writes every byte. On a CPU
under Triton's interpreter (see test_interpreter), and on a GPU, where an operator is called twice: the second call is
launched without Triton's front, into memory that was made without olq.alloc's.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kernels.compare import DEVICES, FLOATS, assert_equal, bit_patterns, like, weight
from torch import Tensor

from numerics import cases
from numerics.cases import OPS, RULES, first_difference, poison
from olq import alloc, kernels
from olq.kernels.launching import unavailable
from olq.kernels.plan_activations import half_of
from olq.numerics import activations

GROUP_LAYOUTS = ("row_major", "mn_major", "ue8m0_words")
BLOCK_LAYOUTS = ("linear", "swizzled_128x4")
SILU, GPT_OSS = (None, 1.0, 0.0), (7.0, 1.702, 1.0)
SILU_FORMS = [
    (SILU, None),
    (GPT_OSS, torch.bfloat16),
    ((0.3, -0.1, -1.5), torch.float16),
    ((None, 0.0, 0.1), None),
    ((None, 1e-30, 0.0), torch.bfloat16),
]


def storage(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def poisoned_like(t: Tensor, device: str) -> Tensor:
    """The same form, with poison in every byte of the storage."""
    raw = torch.full((t.untyped_storage().nbytes(),), 0xA5, dtype=torch.uint8, device=device)
    return torch.empty(0, dtype=t.dtype, device=device).set_(raw.untyped_storage(), 0, t.shape, t.stride())


def assert_new(operator: str, args: tuple[object, ...], device: str) -> None:
    """The kernels write each byte of the storages that the reference makes."""
    want = getattr(OPS, operator)(*args)
    there = tuple(like(a, device) if isinstance(a, Tensor) else a for a in args)
    poisoned = tuple(poisoned_like(t, device) for t in want)
    path = kernels.path(operator, *poisoned, *there)
    assert path.kernels, str(path)
    with np.errstate(all="ignore"):
        assert kernels.launch(operator, there, poisoned)
    results = [("poisoned", poisoned)]
    if device == "cuda":
        results += [(call, getattr(OPS, operator)(*there)) for call in ("made", "made again")]
    for call, outputs in results:
        for name, got, expected in zip(("codes", "scale"), outputs, want, strict=True):
            assert got.stride() == expected.stride()
            found = first_difference(storage(got), storage(expected))
            assert found is None, f"{path}, {call}, {name}: {found}"


def scale_2_for(x: Tensor, value: float = 0.01) -> Tensor:
    return torch.full(x.shape[:-2], value)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.flip(-1)


def calls(x: Tensor, group: int = 128):
    """Every operator and layout on one activation."""
    yield "quantize_fp8_token", (x, False)
    yield "quantize_fp8_token", (x, True)
    for layout in GROUP_LAYOUTS:
        yield "quantize_fp8_group", (x, layout, group, False)
        yield "silu_mul_quantize_fp8", (*halves(x), layout, group, layout == "mn_major")
    for layout in BLOCK_LAYOUTS:
        yield "quantize_mxfp8", (x, layout)
        yield "quantize_nvfp4", (x, scale_2_for(x), layout)


def assert_every_call(x: Tensor, device: str, group: int = 128) -> None:
    for operator, args in calls(x, group):
        assert_new(operator, args, device)


@DEVICES
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 129), (2, 3, 150)], ids=str)
def test_ragged_shapes_and_all_padding(shape, device):
    assert_every_call(weight(*shape), device)


@DEVICES
@pytest.mark.parametrize("shape", [(129, 33), (128, 64), (127, 130)], ids=str)
def test_rows_up_to_whole_tiles_of_swizzled_scales(shape, device):
    x = weight(*shape)
    assert_new("quantize_mxfp8", (x, "swizzled_128x4"), device)
    assert_new("quantize_nvfp4", (x, scale_2_for(x), "swizzled_128x4"), device)


@DEVICES
@pytest.mark.parametrize("columns", [32, 64, 128, 1024])
def test_whole_tiles(columns, device):
    assert_every_call(weight(4, columns), device)


@DEVICES
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_every_dtype_and_every_kind_of_number(dtype, device):
    assert_every_call(bit_patterns(6, 260, dtype=dtype, finite=False), device, 64)


@DEVICES
@pytest.mark.parametrize("shape", [(3, 1), (1, 2), (2, 5)], ids=str)
def test_tiles_of_a_few_elements(shape, device):
    assert_every_call(weight(*shape), device, 1)


@DEVICES
@pytest.mark.parametrize("group", [1, 7, 16, 100, 4096])
def test_any_group(group, device):
    x = weight(5, 300)
    for layout in GROUP_LAYOUTS:
        assert_new("quantize_fp8_group", (x, layout, group, True), device)
        assert_new("silu_mul_quantize_fp8", (*halves(x), layout, group, False), device)


SOURCES = {
    "transposed": lambda: weight(200, 9).t(),
    "a region": lambda: weight(12, 400)[2:9, 17:261],
    "steps": lambda: weight(14, 400)[::2, 1:380:2],
    "expanded": lambda: weight(1, 140).expand(5, 140),
    "experts, transposed": lambda: weight(2, 140, 7).transpose(1, 2),
    "experts, every second": lambda: weight(5, 6, 140)[::2],
}


@DEVICES
@pytest.mark.parametrize("name", SOURCES)
def test_any_strides(name, device):
    assert_every_call(SOURCES[name](), device)


@DEVICES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_as_views_of_one_tensor(interleaved, dtype, device):
    x = bit_patterns(7, 520, dtype=dtype)
    gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :260], x[:, 260:])
    for layout in GROUP_LAYOUTS:
        assert_new("silu_mul_quantize_fp8", (gate, up, layout), device)


@DEVICES
@pytest.mark.parametrize("rule", RULES)
def test_every_exponent_rule(rule, device):
    x = bit_patterns(6, 70, dtype=torch.float32)
    for layout in BLOCK_LAYOUTS:
        assert_new("quantize_mxfp8", (x, layout, rule), device)


@DEVICES
@pytest.mark.parametrize("scale_2", [2.5e36, 1e-41, 0.0, -1.0, float("inf"), float("nan")])
def test_any_tensor_scale_leaves_padding_zero(scale_2, device):
    x = bit_patterns(5, 40, dtype=torch.float32)
    for layout in BLOCK_LAYOUTS:
        assert_new("quantize_nvfp4", (x, scale_2_for(x, scale_2), layout), device)


@DEVICES
@pytest.mark.parametrize(("form", "through"), SILU_FORMS, ids=str)
def test_the_gated_product_of_every_bfloat16_gate(form, through, device):
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    up = torch.ones_like(gate) if form == SILU else gate.flatten()[order].view(64, 1024)
    # A group of one column: no value hides behind a larger or a broken neighbour, and its scale has all its bits.
    assert_new("silu_mul_quantize_fp8", (gate, up, "row_major", 1, False, *form, through), device)


@DEVICES
def test_numbers_that_are_no_float32_go_to_the_reference(device):
    x = weight(2, 32).to(device)
    outputs = alloc.fp8_group_output(2, 32, scale_layout="ue8m0_words", device=device, owner="test")
    for numbers, found in (
        ((1e-60, 1.0, 0.0), "limit=1e-60"),
        ((None, 1e39, 0.0), "alpha=1e+39"),
        ((None, 1.0, -1e39), "beta=-1e+39"),
    ):
        args = (x, x, "ue8m0_words", 128, True, *numbers, None)
        path = kernels.path("silu_mul_quantize_fp8", *outputs, *args)
        assert path.reason == f"{found} is no float32"
    for t in outputs:
        t.fill_(0)


@DEVICES
def test_a_beta_that_rounds_to_zero_still_adds(device):
    x = -torch.zeros(2, 32)
    assert_new("silu_mul_quantize_fp8", (x, x, "ue8m0_words", 128, True, None, 1.0, 1e-60), device)


@DEVICES
def test_into_storage_of_the_caller_and_nowhere_else(device):
    for x in (weight(7, 300), bit_patterns(7, 300, finite=False), weight(2, 5, 130)):
        *lead, n, k = x.shape
        for group in (128, 16, 40):
            width = activations.words_shape(x.shape, group)[-1]
            groups = -(-k // group)
            words = poison(*lead, width, n, dtype=torch.int32).transpose(-1, -2)
            scale = poison(*lead, n, 2 * groups, dtype=torch.float32)[..., ::2]
            codes = poison(*lead, k, n).transpose(-1, -2)
            assert_into("quantize_fp8_words_", (x, codes, words, group), device)
            assert_into("silu_mul_quantize_fp8_", (*halves(x), codes, words, group), device)
            args = (*halves(x), poison(*x.shape), scale, group, False, *GPT_OSS, torch.bfloat16)
            assert_into("silu_mul_quantize_fp8_", args, device)


def assert_into(operator: str, args: tuple[object, ...], device: str) -> None:
    sources = 2 if operator.startswith("silu") else 1
    assert_equal(operator, args, device, outputs=(sources, sources + 1))


@DEVICES
def test_rows_of_the_caller_are_not_padded(device):
    x = weight(5, 130)
    memory = poison(2, 8, dtype=torch.int32).to(device)
    with np.errstate(all="ignore"):
        assert kernels.launch(
            "quantize_fp8_words_", (x.to(device), poison(5, 130).to(device), memory[:1, :5].t(), 128)
        )
    assert memory[0, 5:].eq(memory[1, 0]).all()
    assert memory[0, :5].ne(memory[1, 0]).all()


@DEVICES
@settings(max_examples=4, deadline=None)
@given(x=cases.weights(3, 130))
def test_drawn_bit_patterns(device, x):
    assert_every_call(x, device)


def test_every_second_column_is_read_as_halves_of_words():
    x = torch.zeros(4, 520, dtype=torch.bfloat16)
    for t, half in (
        (x[:, ::2], 0),
        (x[:, 1::2], 1),
        (x[:1, 1::2], 1),
        (x, -1),
        (x[:, 2::2], -1),  # words do not begin at 16 bytes
        (x[:, ::4], -1),
        (x.float()[:, ::2], -1),
        (x.view(-1)[: 4 * 514].view(4, 514)[:, ::2], -1),
        (x[:, :1], -1),
    ):
        assert half_of(t, 0, 128) == half, t.stride()
    assert half_of(x[:, ::2], 520, 6) == half_of(x[:, ::2], 1, 128) == -1


def test_a_call_without_rows_or_columns_goes_to_the_reference():
    for shape in ((0, 40), (3, 0)):
        x = torch.empty(shape)
        for operator, args in calls(x):
            outputs = getattr(OPS, operator)(*args)
            if unavailable(args) is None:
                assert kernels.path(operator, *outputs, *args).reason == "there are no elements"
