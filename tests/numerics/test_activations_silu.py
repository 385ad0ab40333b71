"""The gated product has defined bytes: it equals the oracle's named steps, and its error is what the page states."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics import cases
from olq.numerics.silu import BUFFERS, exp_of_minus, silu_mul
from oracles import activations as oracle

FORMS = [
    {"limit": None, "alpha": 1.0, "beta": 0.0},
    {"limit": 7.0, "alpha": 1.702, "beta": 1.0},
    {"limit": 0.3, "alpha": -0.1, "beta": -1.5},
    {"limit": None, "alpha": 0.0, "beta": 0.1},
    {"limit": None, "alpha": 1e-30, "beta": 0.0},
]


def run(gate, up, **form):
    work = [cases.poison(*gate.shape, dtype=torch.float32, on=gate) for _ in range(BUFFERS)]
    return silu_mul(gate, up, work, **form)


def difference(gate, up, **form):
    """NaN has no defined bits before it is quantized; where it is, is defined."""
    got, want = run(gate, up, **form).cpu(), oracle.silu_mul(cases.numpy_of(gate), cases.numpy_of(up), **form)
    return cases.first_difference(
        torch.nan_to_num(got, nan=1.5, posinf=np.inf, neginf=-np.inf),
        np.where(np.isnan(want), np.float32(1.5), want),
    )


def all_bfloat16():
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@cases.DEVICES
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_bfloat16_gate_gives_the_bytes_of_the_oracle(device, form):
    gate = all_bfloat16()
    up = gate[torch.randperm(len(gate), generator=torch.Generator().manual_seed(0))]
    for u in (torch.ones_like(gate), up):
        assert difference(gate.to(device), u.to(device), **form) is None


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(bits=st.lists(st.integers(0, 0xFFFFFFFF), min_size=2, max_size=60))
def test_any_float32_bits_give_the_bytes_of_the_oracle(form, bits):
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    assert difference(x, x.flip(0), **form) is None


@given(
    gate=st.lists(st.floats(-95, 95, width=32), min_size=1, max_size=40),
    limit=st.none() | st.floats(0.125, 100, width=32),
    alpha=st.floats(-4, 4),
    beta=st.floats(-2, 2),
)
def test_any_alpha_beta_and_limit(gate, limit, alpha, beta):
    x = torch.tensor(gate)
    assert difference(x, x.flip(0) * 0.1, limit=limit, alpha=alpha, beta=beta) is None


def test_the_comparison_finds_an_exponential_of_another_library():
    gate = all_bfloat16()
    gate = gate[torch.isfinite(gate)].float()
    other = torch.nn.functional.silu(gate)
    assert (cases.bytes_of(other) != cases.bytes_of(run(gate, torch.ones_like(gate), **FORMS[0]))).any()


# -- the error, in units of the exact value's last place ------------------------------------------------------


def in_ulp(got: torch.Tensor, exact: np.ndarray) -> float:
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float((np.abs(got.double().numpy() - exact) / spacing).max())


def arguments() -> torch.Tensor:
    """0 to 87: every bfloat16, and float32 all over, evenly in value and in exponent."""
    b = all_bfloat16().float()
    generator = torch.Generator().manual_seed(7)
    even = torch.rand(300_000, generator=generator) * 87
    spread = torch.randint(0, 0x42AE0000, (300_000,), generator=generator, dtype=torch.int32)
    return torch.cat([b[(b >= 0) & (b <= 87)], even, spread.view(torch.float32)])


def test_exp_is_within_one_and_a_half_ulp():
    a = arguments()
    got = exp_of_minus(a.clone(), [torch.empty_like(a) for _ in range(3)])
    assert in_ulp(got, np.exp(-a.double().numpy())) < 1.5


@pytest.mark.parametrize("sign", [1, -1])
def test_silu_is_within_three_and_a_half_ulp_down_to_minus_87(sign):
    g = arguments()
    g = sign * g[g > 0]
    exact = g.double().numpy() / (1 + np.exp(-g.double().numpy()))
    assert in_ulp(run(g, torch.ones_like(g), **FORMS[0]), exact) < 3.5


def test_silu_of_every_bfloat16_is_within_two_and_a_half_ulp_and_0_below_minus_87():
    g = all_bfloat16().float()
    g = g[torch.isfinite(g)]
    with np.errstate(over="ignore"):
        exact = g.double().numpy() / (1 + np.exp(-g.double().numpy()))
    got = run(g, torch.ones_like(g), **FORMS[0])
    gone = g < -87
    assert in_ulp(got[~gone], exact[~gone]) < 2.5
    assert (got[gone] == 0).all()
    assert got[gone].signbit().all()
    assert np.abs(exact[gone]).max() < 2.0**-118


# -- ends -----------------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


def one(gate, up, **form):
    return run(torch.tensor([gate]), torch.tensor([up]), **{**FORMS[0], **form}).item()


def test_values_that_need_no_arithmetic():
    assert one(0.0, 3.0) == 0.0
    assert one(100.0, 0.5) == 50.0
    assert one(-100.0, 1.0) == 0.0
    assert one(2.0, 4.0, alpha=0.0) == 4.0
    assert one(100.0, 100.0, limit=7.0, alpha=100.0, beta=1.0) == 56.0
    assert one(0.5, -100.0, limit=7.0, alpha=0.0, beta=1.0) == 0.25 * -6
    assert one(3.0e38, 1.0) == one(3.0e38, 1.0, alpha=3.0)  # alpha * gate overflows


def test_zeros_keep_their_signs_where_beta_adds_nothing():
    for gate, up in ((0.0, -1.0), (-0.0, 1.0), (1.0, -0.0)):
        assert str(one(gate, up)) == "-0.0"
    assert str(one(1.0, -0.0, beta=1.0)) == str(one(1.0, 0.0, beta=1.0))


def test_nan_goes_through_and_infinities_only_where_nothing_cuts_them():
    for gate, up in ((NAN, 1.0), (1.0, NAN), (-INF, 1.0), (-INF, 0.0), (0.0, INF), (INF, 0.0)):
        assert np.isnan(one(gate, up)), (gate, up)
    assert np.isnan(one(NAN, 1.0, limit=1.0))
    assert np.isnan(one(1.0, NAN, limit=1.0))
    assert one(INF, 2.0) == INF
    assert one(1e30, 1e30) == INF
    assert one(INF, 2.0, limit=100.0) == 200.0
    assert one(100.0, -INF, limit=100.0) == -10000.0


@cases.DEVICES
def test_inputs_may_have_any_strides_and_types(device):
    wide = torch.randn(6, 40, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w = wide.to(dtype)
        for gate, up in ((w[:, ::2], w[:, 1::2]), (w[::2, :5], w[1::2, 20:25]), (w.t()[:7], w.t()[9:16])):
            assert difference(gate, up, **FORMS[1]) is None
