"""Drawn inputs, shapes and parts: what is multiplied has the oracle's bits, and products err as float32 sums do."""

import numpy as np
import pytest
from forward.layers import loaded
from forward.oracle import UNITS
from forward.test_values import CPU_SCALED_MM, check
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.cases import weights
from olq.forward.activations import rounded
from oracles import fp8, mxfp8, nvfp4

KINDS = [
    *[("fp8", {"activations": a, "scale": s}) for a in UNITS for s in ("float32", "power_of_two")],
    *[("mxfp8", {"activations": "group", "rule": r}) for r in ("RCEIL", "FLOOR", "CEIL", "EVEN")],
    ("nvfp4", {"activations": "group"}),
]


def decoded(method, params, x):
    """Quantized and decoded by the oracles' float32 steps."""
    if method == "fp8":
        unit = UNITS[params["activations"]]
        return fp8.dequantize(*fp8.quantize(x, unit, params["scale"] == "power_of_two"), unit)
    if method == "mxfp8":
        return mxfp8.dequantize(*mxfp8.quantize(x, params["rule"]))
    scale_2 = nvfp4.tensor_scale(x)
    return nvfp4.dequantize(*nvfp4.quantize(x, scale_2), scale_2, x.shape[1])


@pytest.mark.parametrize(("method", "params"), KINDS, ids=str)
@settings(deadline=None, max_examples=15)
@given(x=weights(3, 160))
def test_what_is_multiplied_has_the_bits_of_the_oracle(method, params, x):
    stored = STORED[method, str(params)]
    found = rounded(x, stored).numpy().view(np.int32)
    assert np.array_equal(found, decoded(method, params, x.float().numpy()).view(np.int32))


def stored(method, params):
    layer = loaded(method, np.ones((16, 160), np.float32), (16,), **params)
    return layer.quant_method.stored(layer)


STORED = {(method, str(params)): stored(method, params) for method, params in KINDS}
SHAPES = st.tuples(
    st.integers(1, 70), st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(sum), st.integers(1, 200)
)


@settings(deadline=None, max_examples=25)
@given(
    shape=SHAPES,
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    granularity=st.sampled_from(["tensor", "block"]),
)
def test_the_reference_errs_no_more_than_float32_sums(shape, kind, bias, granularity):
    method, params = kind
    more = {"granularity": granularity} if method == "fp8" else {}
    assert check(method, params | more, shape, "bfloat16", bias) <= 1


@CPU_SCALED_MM
@settings(deadline=None, max_examples=40)
@given(
    shape=SHAPES,
    activations=st.sampled_from(["tensor", "token"]),
    granularity=st.sampled_from(["tensor", "channel"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    bias=st.booleans(),
)
def test_scaled_mm_errs_no_more_than_float32_sums(shape, activations, granularity, dtype, bias):
    params = {"granularity": granularity, "activations": activations}
    assert check("fp8", params, shape, dtype, bias, path="scaled_mm") <= 1
