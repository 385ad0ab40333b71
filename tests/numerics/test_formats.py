"""olq.formats says what ml_dtypes and float32 say; names are refused with a way out."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numerics import cases
from olq import formats
from olq.errors import SourceError, UnknownNameError

PEERS = {"E4M3": ml_dtypes.float8_e4m3fn, "E2M1": ml_dtypes.float4_e2m1fn}


@pytest.mark.parametrize("name", PEERS)
def test_every_code_has_the_value_that_ml_dtypes_gives_it(name):
    fmt = formats.FORMATS[name]
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    want = codes.view(PEERS[name]).astype(np.float32)
    got = np.array([fmt.value(c) for c in codes.tolist()], np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    cases.assert_bytes_equal(got[finite], want[finite], "values")
    assert tuple(codes[~finite].tolist()) == fmt.nan_codes


@pytest.mark.parametrize("name", PEERS)
def test_limits_agree_with_ml_dtypes(name):
    fmt, info = formats.FORMATS[name], ml_dtypes.finfo(PEERS[name])
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    assert (fmt.bits, fmt.value(fmt.max_code)) == (info.bits, fmt.max)


def test_every_e8m0_byte_has_the_value_that_ml_dtypes_gives_it():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    got = [formats.e8m0_value(b) for b in range(256)]
    assert got[:255] == want[:255].tolist()
    assert math.isnan(got[255])


def test_a_byte_that_is_no_code_is_refused():
    with pytest.raises(SourceError, match=r"E2M1 has no such code[\s\S]*found:  16[\s\S]*need:   0 to 15"):
        formats.E2M1.value(16)


def test_an_unknown_rule_is_refused_with_the_names():
    with pytest.raises(UnknownNameError, match=r"'rceil'[\s\S]*RCEIL, FLOOR, CEIL, EVEN[\s\S]*upper case"):
        formats.exponent_rule("rceil")


@pytest.mark.parametrize("name", formats.EXPONENT_RULES)
def test_a_rule_says_whether_it_saturates(name):
    rule = formats.EXPONENT_RULES[name]
    largest_kept = 1 + rule.last_without_bump / (1 << 23)
    assert rule.saturates == (largest_kept > 1.75)


scales = st.integers(0x00800000, 0x7F000000).map(
    lambda bits: float(np.array(bits, np.int32).view(np.float32))
)


@given(scale=scales)
def test_the_conventions_of_nvfp4_are_one_float32_division_apart(scale):
    with np.errstate(all="ignore"):
        want = float(np.float32(1) / np.float32(scale))
    assert formats.nvfp4_decode_from_encode(scale) == want
    assert formats.nvfp4_encode_from_decode(scale) == want


def test_a_converted_scale_does_not_always_convert_back():
    """So convert once and keep: over random scales about a quarter do not return."""
    amax = np.random.default_rng(0).uniform(0.01, 10, 2000).astype(np.float32)
    decode = [float(a) for a in amax / np.float32(2688)]
    back = [formats.nvfp4_decode_from_encode(formats.nvfp4_encode_from_decode(s)) for s in decode]
    returned = np.mean([a == b for a, b in zip(decode, back, strict=True)])
    assert 0.7 < returned < 0.95


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e-45])
def test_a_scale_without_reciprocal_is_refused(scale):
    with pytest.raises(SourceError, match=r"no reciprocal[\s\S]*where:  weight_global_scale"):
        formats.nvfp4_decode_from_encode(scale)
    with pytest.raises(SourceError, match="where:  weight_scale_2"):
        formats.nvfp4_encode_from_decode(scale)
