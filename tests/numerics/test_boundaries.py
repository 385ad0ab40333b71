"""Float32 weights within two ulps of every place where a scale changes, and at both ends of the range."""

import numpy as np
import pytest
import torch

from numerics import cases

F32_MAX = float(np.float32(3.4028234663852886e38))
MANTISSAS = (1.0, 1.75, 1.9375)  # where CEIL, RCEIL and EVEN step


def boundaries() -> torch.Tensor:
    """All m * 2**e for the mantissas at which a rule steps and every exponent of float32, with neighbours."""
    exponents = np.arange(-149, 128)
    values = np.concatenate([m * 2.0**exponents for m in MANTISSAS])
    return torch.from_numpy(cases.near(values))


def placed(x: torch.Tensor, width: int, column: int) -> torch.Tensor:
    """Each value alone in a row, the rest smaller by 1, 3, 2**9 and 2**10 binades or zero."""
    w = torch.zeros(len(x), width)
    for offset, factor in ((1, -0.5), (2, 0.125), (3, 2.0**-9), (4, -(2.0**-10))):
        w[:, (column + offset) % width] = x * factor
    w[:, column] = x
    return w


@cases.DEVICES
@pytest.mark.parametrize("name", [f"mxfp8-{rule}" for rule in cases.RULES])
def test_mxfp8_beside_every_boundary_of_the_exponent(device, name):
    cases.assert_equals_oracle(name, placed(boundaries(), 32, 7).to(device))


@cases.DEVICES
@pytest.mark.parametrize("power", ["pow2", "f32"])
def test_fp8_beside_every_boundary_of_the_exponent(device, power):
    cases.assert_equals_oracle(f"fp8-channel-{power}", placed(boundaries(), 8, 7).to(device))


@cases.DEVICES
def test_nvfp4_tensor_scale_beside_every_power_of_two(device):
    cases.assert_equals_oracle("nvfp4", placed(boundaries(), 16, 3)[:, None, :].to(device))


@cases.DEVICES
@pytest.mark.parametrize("s2", [1.0, 1 / 2688, 3e-5, 1e30, 2.0**-117])
def test_nvfp4_block_scale_beside_every_tie_of_e4m3(device, s2):
    """Block maxima within two ulps of 6 * s2 * (each E4M3 value, and each middle between two)."""
    codes = np.arange(127, dtype=np.uint8)
    values = np.array(
        [cases.nvfp4.F(c) for c in codes.view(cases.ml_dtypes.float8_e4m3fn).astype(np.float32)]
    )
    middles = (values[1:] + values[:-1]) / 2
    amax = cases.near(np.concatenate([values, middles, [460.0, 500.0]]) * 6 * np.float32(s2))
    w, scale_2 = placed(torch.from_numpy(amax), 16, 5).to(device), torch.tensor(s2, device=device)
    got, want = cases.run_nvfp4(w, scale_2=scale_2), cases.want_nvfp4(w, scale_2=scale_2.item())
    for what, g, o in zip(cases.WHAT, got, want, strict=True):
        cases.assert_bytes_equal(g, o, what)


@cases.DEVICES
@pytest.mark.parametrize(
    "scale_2", [0.0, -1.0, float("inf"), float("nan"), 2.0**-140, 2.0**-149, 1e38, 3.4e38]
)
def test_nvfp4_with_any_given_tensor_scale_is_defined(device, scale_2):
    w = torch.tensor([[0.0, -0.0, 1.0, -1e38, 3e38, 1e-38, 1e-44, 6.0] * 4, [0.0] * 32])
    got, want = (
        cases.run_nvfp4(w.to(device), scale_2=torch.tensor(scale_2, device=device)),
        cases.want_nvfp4(w, scale_2=scale_2),
    )
    for what, g, o in zip(cases.WHAT, got, want, strict=True):
        cases.assert_bytes_equal(g, o, what)


@cases.DEVICES
@pytest.mark.parametrize("name", cases.METHODS)
def test_zeros_of_both_signs(device, name):
    w = torch.zeros(3, 40)
    w[1] = -0.0
    w[2, ::3] = -0.0
    cases.assert_equals_oracle(name, w.to(device))


@cases.DEVICES
@pytest.mark.parametrize("name", cases.METHODS)
@pytest.mark.parametrize("value", [2.0**-149, 2.0**-126, 1e-40, 448.0, 447.99997, F32_MAX, 3.3895314e38])
def test_ends_of_the_range(device, name, value):
    w = torch.full((2, 33), value)
    w[:, 1::2] *= -0.75
    w[1, 5] = 0.0
    cases.assert_equals_oracle(name, w.to(device))


@cases.DEVICES
def test_the_scales_of_zeros_are_one_and_byte_zero(device):
    w = torch.zeros(2, 64, device=device)
    assert cases.run_fp8(w, (1, 0))[1].tolist() == [[1.0], [1.0]]
    assert cases.run_fp8(w, (0, 0), True)[1].tolist() == [[1.0]]
    assert cases.run_mxfp8(w)[1].tolist() == [[0, 0], [0, 0]]
    codes, scale, scale_2 = cases.run_nvfp4(w)
    assert (codes.max(), scale.max(), scale_2.item()) == (0, 0, 1.0)


@cases.DEVICES
@pytest.mark.parametrize("value", [2.0**-149, 2.0**-126, 1e-39, 1e-36])
def test_a_scale_is_always_positive_normal_and_has_a_finite_reciprocal(device, value):
    w = torch.full((1, 32), value, device=device)
    for scale in (*(cases.run_fp8(w, (1, 0), p)[1] for p in (False, True)), cases.run_nvfp4(w)[2]):
        assert torch.finfo(torch.float32).tiny <= scale.item() < float("inf")
        assert 0 < 1 / scale.item() <= 2.0**126


@cases.DEVICES
def test_reciprocals_of_the_largest_scales_are_normal(device):
    w = torch.full((1, 32), F32_MAX, device=device)
    for scale in (*(cases.run_fp8(w, (1, 0), p)[1] for p in (False, True)), cases.run_nvfp4(w)[2]):
        assert (1 / scale).item() > torch.finfo(torch.float32).tiny
    _, block, scale_2 = cases.run_nvfp4(w)
    largest_step = block.view(torch.float8_e4m3fn).float() * scale_2
    assert (1 / largest_step).min().item() > torch.finfo(torch.float32).tiny
