"""Every finite bfloat16 value, in every role, under every method: operator equals oracle, byte for byte."""

import numpy as np
import pytest
import torch

from numerics import cases
from olq.formats import E2M1, E4M3
from olq.numerics.chunks import Scratch
from olq.numerics.rounding import round_to_e2m1_, round_to_e4m3_
from oracles import nvfp4

BLOCKED = [name for name in cases.METHODS if name.startswith("mxfp8")]
ROWS = ["fp8-channel-f32", "fp8-channel-pow2"]


def test_there_are_65280_finite_bfloat16_values():
    assert len(cases.finite_bfloat16()) == 65_280


@cases.DEVICES
@pytest.mark.parametrize("name", ROWS + BLOCKED)
def test_every_bfloat16_as_the_largest_of_its_unit(device, name):
    cases.assert_equals_oracle(name, cases.largest_of_their_blocks(32 if name in BLOCKED else 8).to(device))


@cases.DEVICES
@pytest.mark.parametrize("name", ROWS + BLOCKED)
def test_every_bfloat16_as_an_ordinary_element(device, name):
    cases.assert_equals_oracle(name, cases.ordinary_elements(32).to(device))


@cases.DEVICES
def test_every_bfloat16_as_the_largest_of_an_nvfp4_tensor(device):
    """65,280 matrices of one block each: the leading dimension is that of experts."""
    cases.assert_equals_oracle("nvfp4", cases.largest_of_their_blocks(16)[:, None, :].to(device))


@cases.DEVICES
def test_every_bfloat16_as_the_largest_of_an_nvfp4_block(device):
    """Beside a tensor maximum of 1: from blocks that saturate to those whose scale is subnormal or 0."""
    w, s2 = cases.largest_of_their_blocks(16).to(device), torch.tensor(1 / 2688, device=device)
    got, want = cases.run_nvfp4(w, scale_2=s2), cases.want_nvfp4(w, scale_2=s2.item())
    for what, g, o in zip(cases.WHAT, got, want, strict=True):
        cases.assert_bytes_equal(g, o, what)


@cases.DEVICES
def test_every_bfloat16_as_an_ordinary_nvfp4_element(device):
    cases.assert_equals_oracle("nvfp4", cases.ordinary_elements(16)[:, None, :].to(device))


@cases.DEVICES
def test_every_bfloat16_rounds_to_the_nearest_e2m1_code(device):
    x = cases.finite_bfloat16().float().to(device)
    codes = round_to_e2m1_(x.abs(), x.clone(), Scratch(x.numel(), x.device, 16))
    want = np.array([nvfp4.e2m1(v) for v in x.tolist()], np.uint8)
    cases.assert_bytes_equal(codes, want, "the operator's rounding")
    cases.assert_bytes_equal(nvfp4.cast(x.cpu().numpy()), want, "the oracle's rounding")


@cases.DEVICES
def test_every_bfloat16_rounds_to_the_nearest_e4m3_code(device):
    x = cases.finite_bfloat16().float().to(device)
    codes = cases.poison(*x.shape, on=x)
    round_to_e4m3_(x.clone(), codes)
    values = [E4M3.value(c) for c in range(E4M3.max_code + 1)]
    for number, code in zip(x.tolist(), codes.tolist(), strict=True):
        magnitude = min(abs(number), E4M3.max)
        error = abs(values[code & 0x7F] - magnitude)
        beside = [
            abs(values[c] - magnitude) for c in (max((code & 0x7F) - 1, 0), min((code & 0x7F) + 1, 126))
        ]
        assert error <= min(beside), (number, code)
        assert error < min(beside) or code % 2 == 0 or min(beside) == 0, (number, code)
        assert bool(code & E4M3.sign_mask) == bool(np.signbit(number)), (number, code)


@cases.DEVICES
def test_every_float32_beside_a_tie_rounds_to_the_nearest_e2m1_code(device):
    """Ties of E2M1 and their neighbours in float32, where a second rounding would show."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, *(E2M1.value(c) for c in range(8))])
    x = torch.from_numpy(np.concatenate([cases.near(ties, 40), -cases.near(ties, 40)])).to(device)
    codes = round_to_e2m1_(x.abs(), x.clone(), Scratch(x.numel(), x.device, 16))
    cases.assert_bytes_equal(codes, np.array([nvfp4.e2m1(v) for v in x.tolist()], np.uint8), "codes")
