"""Packed exponents and the fused gate equal the oracle on every byte, for any shape, stride, group and budget."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics import cases
from olq.numerics import activations, chunks
from olq.testing.memory import measure_memory
from oracles import activations as oracle

BUDGETS = pytest.mark.parametrize("budget", [1, 40_000, None])
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
SILU = {"limit": None, "alpha": 1.0, "beta": 0.0}


@contextmanager
def budget_of(size: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if size is not None:
            patch.setattr(chunks, "BYTES", size)
            patch.setattr(activations, "_WORD_BUDGET", size)
        yield


def run_words(x, group=128):
    codes = cases.poison(*x.shape, on=x)
    words = cases.poison(*activations.words_shape(x.shape, group), dtype=torch.int32, on=x)
    cases.OPS.quantize_fp8_words_(x, codes, words, group)
    return codes, words


def run_silu(gate, up, group=128, scale="words", through=None, power_of_two=True, **form):
    codes = cases.poison(*gate.shape, on=gate)
    if scale == "words":
        out = cases.poison(*activations.words_shape(gate.shape, group), dtype=torch.int32, on=gate)
    else:
        out = cases.poison(*gate.shape[:-1], -(-gate.shape[-1] // group), dtype=torch.float32, on=gate)
    cases.OPS.silu_mul_quantize_fp8_(
        gate, up, codes, out, group, power_of_two, form["limit"], form["alpha"], form["beta"], through
    )
    return codes, out


def want_words(y, group=128):
    codes, scales = oracle.quantize_groups(y, group, True)
    return codes, oracle.words(oracle.exponents(scales))


def want_silu(gate, up, group=128, scale="words", through=None, power_of_two=True, **form):
    y = oracle.silu_mul(cases.numpy_of(gate), cases.numpy_of(up), **form, through=cases.NAMES[through])
    return want_words(y, group) if scale == "words" else oracle.quantize_groups(y, group, power_of_two)


def assert_same(got, want):
    for what, g, w in zip(cases.WHAT, got, want, strict=False):
        cases.assert_bytes_equal(g, w, what)


@st.composite
def rows(draw):
    return draw(cases.weights(draw(st.integers(1, 5)), draw(st.sampled_from([1, 15, 33, 127, 129, 600]))))


@BUDGETS
@settings(max_examples=20)
@given(x=rows(), group=st.sampled_from([1, 3, 32, 128, 200]))
def test_words_of_any_bits(budget, x, group):
    with budget_of(budget):
        got = run_words(x, group)
    assert_same(got, want_words(cases.numpy_of(x).astype(np.float32), group))


@BUDGETS
@settings(max_examples=20)
@given(
    x=rows(),
    group=st.sampled_from([1, 32, 128]),
    scale=st.sampled_from(["words", "float32"]),
    through=st.sampled_from([None, torch.bfloat16, torch.float16]),
    power_of_two=st.booleans(),
    form=st.sampled_from([SILU, GPT_OSS]),
)
def test_fused_gate_of_any_bits(budget, x, group, scale, through, power_of_two, form):
    up = x.flip(0, 1)
    options = {"group": group, "scale": scale, "through": through, "power_of_two": power_of_two, **form}
    with budget_of(budget):
        got = run_silu(x, up, **options)
    assert_same(got, want_silu(x, up, **options))


@cases.DEVICES
@pytest.mark.parametrize("form", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("through", [None, torch.bfloat16])
def test_fused_gate_of_every_bfloat16(device, form, through):
    gate = cases.finite_bfloat16().view(-1, 256)
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = run_silu(gate.to(device), up.to(device), through=through, **form)
    assert_same(got, want_silu(gate, up, through=through, **form))


def test_a_budget_smaller_than_the_tensor_changes_no_byte():
    x = torch.randn(2, 15, 1300, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = run_words(x), run_silu(x, x.flip(0), **GPT_OSS)
    with budget_of(1):
        pieces = run_words(x), run_silu(x, x.flip(0), **GPT_OSS)
    for a, b in zip(whole, pieces, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_poison_stays_in_its_group_and_is_exponent_255_and_codes_0(value):
    x = torch.ones(3, 300)
    x[1, 130] = value
    for codes, words in (run_words(x), run_silu(torch.full_like(x, 50.0), x, **SILU)):
        lanes = words.contiguous().view(torch.uint8).view(3, 4)
        assert (lanes == 255).nonzero().tolist() == [[1, 1]]
        assert (codes[1, 128:256] == 0).all()
        assert codes[1, :128].min() > 0
        assert codes[1, 256:].min() > 0
        assert (lanes[:, 3] == 0).all()  # no group there


def test_fused_equals_quantizing_the_product():
    gate = torch.randn(5, 384, generator=torch.Generator().manual_seed(3)) * 4
    up = torch.randn(5, 384, generator=torch.Generator().manual_seed(4))
    y = torch.from_numpy(oracle.silu_mul(gate.numpy(), up.numpy()))
    assert_same(run_silu(gate, up, **SILU), run_words(y))
    assert_same(run_silu(gate, up, through=torch.bfloat16, **SILU), run_words(y.bfloat16()))


LARGE = [(1, 1 << 21), (1 << 16, 32), (1 << 18, 1), (1 << 11, 8, 128), (3, 700_001)]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so each time
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_scratch_is_bounded_whatever_the_shape(shape, fused):
    x = torch.ones(*shape[:-1], 1, dtype=torch.bfloat16).expand(shape)

    def run():
        return run_silu(x, x, through=torch.float16, **GPT_OSS) if fused else run_words(x)

    held = sum(out.numel() * out.element_size() for out in run())
    assert measure_memory(run).peak_bytes - held < 8 << 20
