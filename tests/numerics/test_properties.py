"""Operator equals oracle on awkward bit patterns, shapes and strides, however the tensor is chunked."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from numerics import cases
from olq.numerics import chunks

NAMES = st.sampled_from(sorted(cases.METHODS))
THROUGH = st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32])


BUDGETS = pytest.mark.parametrize("budget", [1, 1000, chunks.BYTES])
"""Bytes of the large buffers: one block of 32 fits; a few blocks, less than a row or a tensor; the default."""


@contextmanager
def buffers_of(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BYTES", size)
        yield


@st.composite
def matrices(draw):
    return draw(cases.weights(draw(st.integers(1, 5)), draw(st.integers(1, 70))))


@BUDGETS
@given(name=NAMES, w=matrices(), through=THROUGH, saturate=st.booleans())
def test_any_bits_any_ragged_shape(budget, name, w, through, saturate):
    event(f"{name}, {w.dtype} through {through}")
    with buffers_of(budget):
        cases.assert_equals_oracle(name, w, through=through, saturate=saturate)


@BUDGETS
@given(
    w=cases.weights(6, 37),
    block=st.tuples(st.integers(0, 7), st.integers(0, 40)),
    power_of_two=st.booleans(),
)
def test_fp8_blocks_of_any_size(budget, w, block, power_of_two):
    with buffers_of(budget):
        got, want = cases.run_fp8(w, block, power_of_two), cases.want_fp8(w, block, power_of_two)
    for what, g, o in zip(cases.WHAT, got, want, strict=False):
        cases.assert_bytes_equal(g, o, what)


def transposed(w):
    return w.t().contiguous().t()


def every_second(w):
    wide = torch.full((2 * w.shape[0] + 1, 3 * w.shape[1]), 777.0, dtype=w.dtype)
    wide[1::2, ::3] = w
    return wide[1::2, ::3]


def expanded_rows(w):
    return w[:1].expand(w.shape)


def expanded_columns(w):
    return w[:, :1].expand(w.shape)


STRIDES = [transposed, every_second, expanded_rows, expanded_columns]


@BUDGETS
@settings(max_examples=20)
@pytest.mark.parametrize("strided", STRIDES, ids=lambda f: f.__name__)
@given(name=NAMES, w=cases.weights(5, 50))
def test_strides_of_the_source_do_not_matter(budget, strided, name, w):
    view = strided(w)
    with buffers_of(budget):
        cases.assert_equals_oracle(name, view, want=cases.METHODS[name][1](view.contiguous()))


@BUDGETS
@settings(max_examples=20)
@pytest.mark.parametrize("lead", [(3,), (2, 3), (1, 1, 2)])
@given(name=NAMES, data=st.data())
def test_leading_dimensions_are_matrices_of_their_own(budget, lead, name, data):
    matrices = torch.Size(lead).numel()
    flat = data.draw(cases.weights(matrices * 3, 20))
    with buffers_of(budget):
        cases.assert_equals_oracle(name, flat.view(*lead, 3, 20))


@given(name=NAMES, w=cases.weights(3, 24, dtypes=(torch.float64,)))
def test_float64_is_rounded_to_float32_first(name, w):
    w = w * (1 + 2.0**-25)
    w = w.clamp(-3e38, 3e38)
    cases.assert_equals_oracle(name, w)
    cases.assert_equals_oracle(name, w, through=torch.bfloat16)


def test_through_is_what_a_copy_into_the_parameter_gives():
    w = torch.randn(5, 40, dtype=torch.float64) * 300
    for through in (torch.bfloat16, torch.float16, torch.float32):
        parameter = torch.empty(5, 40, dtype=through)
        parameter.copy_(w)
        for name, (run, _) in cases.METHODS.items():
            for g, o in zip(run(w, through=through), run(parameter), strict=True):
                cases.assert_bytes_equal(g, o, f"{name} through {through}")


# -- non-finite values ------------------------------------------------------------------------------------

NON_FINITE = (float("inf"), -float("inf"), float("nan"))


@pytest.mark.parametrize("name", cases.METHODS)
@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("through", [None, torch.bfloat16, torch.float16])
def test_non_finite_elements(name, value, saturate, through):
    w = torch.linspace(-3, 3, 3 * 130).view(3, 130)
    w[1, 35] = value
    cases.assert_equals_oracle(name, w, saturate=saturate, through=through)


@pytest.mark.parametrize("name", cases.METHODS)
def test_an_overflow_on_the_way_through_float16_is_an_infinity(name):
    w = torch.linspace(-3, 3, 3 * 40).view(3, 40)
    w[1, 35] = 70000.0
    cases.assert_equals_oracle(name, w, through=torch.float16)
    cases.assert_equals_oracle(name, w, through=torch.float16, saturate=True)


def test_poison_stays_in_its_unit_and_shows_in_its_scale():
    w = torch.ones(4, 64)
    w[1, 40] = float("nan")
    codes, scale = cases.run_fp8(w, (1, 0))
    assert scale.isnan().squeeze().tolist() == [False, True, False, False]
    assert (codes[1].max(), codes[0].min()) == (0, 0x7E)
    codes, scale = cases.run_mxfp8(w)
    assert (scale == 255).nonzero().tolist() == [[1, 1]]
    assert (codes[1, 32:].max(), codes[1, :32].min()) == (0, 0x78)
    codes, scale, scale_2 = cases.run_nvfp4(w)
    assert (scale_2.isnan().item(), scale.unique().tolist(), codes.max()) == (True, [0x7F], 0)
    codes, scale, _ = cases.run_nvfp4(w, scale_2=torch.tensor(1 / 2688))
    assert (scale == 0x7F).nonzero().tolist() == [[1, 2]]


def test_poison_of_one_matrix_leaves_the_others():
    w = torch.ones(3, 2, 32)
    w[1, 0, 3] = float("inf")
    codes, scale, scale_2 = cases.run_nvfp4(w)
    assert scale_2.isnan().tolist() == [False, True, False]
    assert [0x7F in matrix for matrix in scale] == [False, True, False]
    assert codes.flatten(1).amax(-1).tolist() == [0x77, 0, 0x77]


@given(name=NAMES, data=st.data())
def test_saturate_equals_quantizing_the_finite_stand_in(name, data):
    w = data.draw(cases.weights(3, 40, dtypes=(torch.bfloat16,)))
    holes = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 39)), min_size=1, max_size=5))
    for (i, j), value in zip(holes, NON_FINITE * 2, strict=False):
        w[i, j] = value
    stand_in = torch.nan_to_num(w, nan=0.0)
    cases.assert_equals_oracle(name, w, saturate=True)
    for g, o in zip(cases.METHODS[name][0](w, saturate=True), cases.METHODS[name][0](stand_in), strict=True):
        cases.assert_bytes_equal(g, o, name)
