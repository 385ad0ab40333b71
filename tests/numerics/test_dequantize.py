"""Decoding equals the oracle on every code under every scale, in every output type."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics import cases
from olq.formats import E2M1, E4M3, e8m0_value
from olq.numerics import chunks
from oracles import fp8, mxfp8, nvfp4

OPS = torch.ops.olq
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rounded(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal bytes; NaN only has to be NaN, its bits are the machine's."""
    assert torch.equal(got.isnan(), want.isnan()), what
    cases.assert_bytes_equal(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0), what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_e4m3_code_under_every_e8m0_byte(dtype):
    codes = torch.arange(256).repeat(256, 1).to(torch.uint8)
    scale = torch.arange(256).repeat(8, 1).t().contiguous().to(torch.uint8)
    out = cases.poison(256, 256, dtype=dtype)
    OPS.dequantize_mxfp8_(codes, scale, out, "linear", 0, 1, 0)
    same(out, rounded(mxfp8.dequantize(codes.numpy(), scale.numpy()), dtype), "values")
    if dtype == torch.float32:
        with np.errstate(all="ignore"):
            want = [[np.float32(E4M3.value(c) * e8m0_value(b)) for c in range(256)] for b in range(256)]
        same(out, torch.tensor(np.array(want)), "values by olq.formats")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s2", [1.0, 3.0517578e-05, 2.0**-117, 1e35])
def test_every_e2m1_code_under_every_e4m3_byte(dtype, s2):
    packed = torch.arange(256).repeat(256, 1).to(torch.uint8)
    scale = torch.arange(256).repeat(32, 1).t().contiguous().to(torch.uint8)
    out = cases.poison(256, 512, dtype=dtype)
    OPS.dequantize_nvfp4_(packed, scale, torch.tensor(s2), out, "linear", 0, 1, 0)
    few = np.s_[::15, :]  # the oracle goes element by element
    want = nvfp4.dequantize(packed.numpy()[few], scale.numpy()[few], np.float32(s2), 512)
    same(out[few], rounded(want, dtype), "values")
    assert tuple(E2M1.value(c) for c in range(8)) == nvfp4.VALUES


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    block=st.sampled_from([(0, 0), (1, 0), (128, 128), (2, 3)]),
    scales=st.lists(st.integers(0, 0x7F800000), min_size=4, max_size=4),
)
@settings(max_examples=20)
def test_every_e4m3_code_under_any_float32_scale(dtype, block, scales):
    codes = torch.arange(256).view(4, 64).to(torch.uint8)
    bounds = fp8.unit_bounds((4, 64), block)
    shape = len(bounds), len(bounds[0])
    scale = torch.from_numpy(np.resize(np.array(scales, np.int32), shape).view(np.float32))
    out = cases.poison(4, 64, dtype=dtype)
    OPS.dequantize_fp8_(codes, scale, out, *block)
    same(out, rounded(fp8.dequantize(codes.numpy(), scale.numpy(), block), dtype), "values")


@pytest.mark.parametrize("budget", [1, 1000, chunks.BYTES])
@pytest.mark.parametrize("k", [1, 16, 31, 50])
@pytest.mark.parametrize("lead", [(), (2, 2)], ids=str)
def test_what_was_quantized_is_decoded_however_it_is_chunked(lead, k, budget, monkeypatch):
    monkeypatch.setattr(chunks, "BYTES", budget)
    w = torch.randn(*lead, 5, k, generator=torch.Generator().manual_seed(1))
    matrices = [(*lead,)] if lead else [()]
    out = {name: cases.poison(*w.shape, dtype=torch.float32) for name in ("fp8", "mxfp8", "nvfp4")}
    fp8_codes, fp8_scale = cases.run_fp8(w, (2, 3))
    OPS.dequantize_fp8_(fp8_codes, fp8_scale, out["fp8"], 2, 3)
    mx_codes, mx_scale = cases.run_mxfp8(w)
    OPS.dequantize_mxfp8_(mx_codes, mx_scale, out["mxfp8"], "linear", 0, 1, 0)
    nv_codes, nv_scale, nv_scale_2 = cases.run_nvfp4(w)
    OPS.dequantize_nvfp4_(nv_codes, nv_scale, nv_scale_2, out["nvfp4"], "linear", 0, 1, 0)
    for matrix in np.ndindex(*matrices[0]):
        one = [t[matrix].numpy() for t in (fp8_codes, fp8_scale)]
        cases.assert_bytes_equal(out["fp8"][matrix], fp8.dequantize(*one, (2, 3)), "fp8")
        one = [t[matrix].numpy() for t in (mx_codes, mx_scale)]
        cases.assert_bytes_equal(out["mxfp8"][matrix], mxfp8.dequantize(*one), "mxfp8")
        one = [t[matrix].numpy() for t in (nv_codes, nv_scale, nv_scale_2)]
        cases.assert_bytes_equal(out["nvfp4"][matrix], nvfp4.dequantize(*one, k), "nvfp4")


def test_outputs_may_be_views_with_steps():
    w = torch.randn(6, 33)
    codes, scale = cases.run_mxfp8(w)
    plain, storage = (
        cases.poison(6, 33, dtype=torch.bfloat16),
        torch.full((12, 70), 7.0, dtype=torch.bfloat16),
    )
    OPS.dequantize_mxfp8_(codes, scale, plain, "linear", 0, 1, 0)
    OPS.dequantize_mxfp8_(codes, scale, storage[::2, 1:67:2], "linear", 0, 1, 0)
    cases.assert_bytes_equal(storage[::2, 1:67:2], plain, "values")
    assert (storage[1::2] == 7).all()


def decoded(name: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values after a round trip, and the step of one code's unit at each element's block, float64."""
    out = torch.empty(w.shape)
    if name == "fp8":
        codes, scale = cases.run_fp8(w, (1, 0))
        OPS.dequantize_fp8_(codes, scale, out, 1, 0)
        return out.double(), scale.double().expand(w.shape)
    if name == "nvfp4":
        codes, scale, scale_2 = cases.run_nvfp4(w)
        OPS.dequantize_nvfp4_(codes, scale, scale_2, out, "linear", 0, 1, 0)
        step = scale.view(torch.float8_e4m3fn).double() * scale_2.double()
        return out.double(), step.repeat_interleave(16, -1)
    codes, scale = cases.run_mxfp8(w, name)
    OPS.dequantize_mxfp8_(codes, scale, out, "linear", 0, 1, 0)
    step = torch.tensor([[e8m0_value(b) for b in row] for row in scale.tolist()], dtype=torch.float64)
    return out.double(), step.repeat_interleave(32, -1)


FINITE = cases.weights(2, 32, dtypes=(torch.bfloat16,)).map(lambda w: torch.nan_to_num(w).clamp(-3e38, 3e38))


@pytest.mark.parametrize("name", ["fp8", "RCEIL", "CEIL"])
@given(w=FINITE)
def test_e4m3_without_saturation_errs_by_at_most_half_a_step(name, w):
    out, unit = decoded(name, w)
    code = w.double() / unit
    step = 2.0 ** (code.abs().clamp(min=E4M3.min_normal).log2().floor() - E4M3.mantissa_bits)
    # fp8 multiplies by a rounded reciprocal, and decodes with one rounding more.
    slack = 2.0**-22 * w.double().abs() + 2.0**-149 if name == "fp8" else 0.0
    assert ((out - w.double()).abs() <= 0.5 * step * unit + slack).all()


@given(w=FINITE)
def test_nvfp4_errs_by_at_most_half_a_step_below_6(w):
    out, unit = decoded("nvfp4", w)
    code = torch.where(unit > 0, w.double() / unit, 0.0)
    step = torch.where(code.abs() < 2, 0.5, torch.where(code.abs() < 4, 1.0, 2.0))
    slack = 2.0**-21 * w.double().abs() + 2.0**-149
    inside = (unit > 0) & (code.abs() <= 6)
    assert ((out - w.double()).abs() <= 0.5 * step * unit + slack)[inside].all()
    assert (out.abs() <= w.double().abs() + slack)[(unit > 0) & (code.abs() > 6)].all()


@pytest.mark.parametrize("name", cases.RULES)
@given(w=FINITE)
def test_decoded_mxfp8_values_quantize_to_themselves(name, w):
    once, _ = decoded(name, w)
    twice, _ = decoded(name, once.float())
    cases.assert_bytes_equal(twice, once, "values")


def test_what_the_largest_values_decode_to():
    """float32 scales reach every finite value; powers of two end at 248 * 2**120."""
    bits = torch.arange(0x7F700000, 0x7F800000, 61, dtype=torch.int32)
    x = torch.cat([bits, torch.tensor([0x7F77FFFF, 0x7F780000, 0x7F7FFFFF], dtype=torch.int32)])
    x = x.view(torch.float32)[:, None]
    assert decoded("fp8", x)[0].isfinite().all()
    codes, scale, scale_2 = cases.run_nvfp4(x[:, None])
    out = torch.empty(len(x), 1, 1)
    OPS.dequantize_nvfp4_(codes, scale, scale_2, out, "linear", 0, 1, 0)
    assert out.isfinite().all()
    out = torch.empty_like(x)
    OPS.dequantize_mxfp8_(*cases.run_mxfp8(x), out, "linear", 0, 1, 0)
    assert torch.equal(out.isinf(), x >= 248 * 2.0**120)
