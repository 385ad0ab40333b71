"""Values of every path that runs on a CPU against float64: bounds follow from float32 sums and one rounding."""

import numpy as np
import pytest
import torch
from forward.layers import DTYPES, loaded, numbers, rounded, split
from forward.oracle import input_values, product, sums, weight_values, worst

import olq
from olq import forward
from olq.forward import scaled_blocks

CPU_SCALED_MM = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="scaled_mm on a CPU needs torch 2.13"
)
METHODS = [
    ("fp8", {"granularity": "tensor"}),
    ("fp8", {"granularity": "channel", "scale": "power_of_two"}),
    ("fp8", {"granularity": "block"}),
    ("mxfp8", {}),
    ("mxfp8", {"scale_layout": "swizzled_128x4", "rule": "FLOOR"}),
    ("nvfp4", {}),
    ("nvfp4", {"scale_layout": "swizzled_128x4", "scale_sharing": "common"}),
]
QUANTIZED = [
    *[
        ("fp8", {"granularity": g, "activations": a})
        for g in ("tensor", "channel", "block")
        for a in ("tensor", "token", "group")
    ],
    ("fp8", {"granularity": "channel", "activations": "token", "scale": "power_of_two"}),
    ("mxfp8", {"activations": "group"}),
    ("mxfp8", {"activations": "group", "rule": "EVEN", "scale_layout": "swizzled_128x4"}),
    ("nvfp4", {"activations": "group"}),
]
SHAPES = [(3, (16,), 64), (5, (7, 0, 24), 100), (1, (130, 30), 257), (17, (1,), 1)]


def check(method, params, shape, dtype="float32", bias=False, path="auto"):
    m, parts, k = shape
    w, x = numbers(1, sum(parts), k), rounded(numbers(2, m, k), DTYPES[dtype])
    b = rounded(numbers(3, sum(parts)), DTYPES[dtype]) if bias else None
    layer = loaded(method, w, parts, b, path=path, **params)
    y = layer(x)
    assert (y.dtype, tuple(y.shape)) == (x.dtype, (m, sum(parts)))
    offset = None if b is None else b.double().numpy()
    exact, magnitude = product(
        input_values(method, x.float().numpy(), params),
        weight_values(method, split(w, parts), params),
        offset,
    )
    return worst(y.float().numpy(), exact, magnitude, sums(k), dtype, offset)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "params"), QUANTIZED, ids=str)
def test_reference_of_quantized_activations(method, params, shape):
    assert check(method, params, shape) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("method", "params"), QUANTIZED, ids=str)
def test_reference_of_quantized_activations_rounds_once(method, params, dtype):
    assert check(method, params, (5, (7, 24), 100), dtype) <= 1
    assert check(method, params, (5, (7, 24), 100), dtype, bias=True) <= 1


@pytest.mark.parametrize("path", ["reference", "matmul"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "params"), METHODS, ids=str)
def test_weight_only(method, params, shape, path):
    assert check(method, params, shape, path=path) <= 1
    assert check(method, params, shape, bias=True, path=path) <= 1


@CPU_SCALED_MM
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ["tensor", "token"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("shape", [*SHAPES, (70, (16, 8), 40)], ids=str)
def test_scaled_mm_on_a_cpu(granularity, activations, shape, dtype):
    params = {"granularity": granularity, "activations": activations}
    assert check("fp8", params, shape, dtype, path="scaled_mm") <= 1
    assert check("fp8", params, shape, dtype, bias=True, path="scaled_mm") <= 1


def test_float64_inputs_are_multiplied_in_float64():
    w, x = numbers(1, 24, 100), numbers(2, 5, 100).astype(np.float64)
    params = {"activations": "token"}
    y = loaded("fp8", w, (24,), **params)(torch.from_numpy(x))
    assert y.dtype == torch.float64
    exact, magnitude = product(
        input_values("fp8", x.astype(np.float32), params), weight_values("fp8", [w], params)
    )
    assert worst(y.numpy(), exact, magnitude, 3 * 2.0**-24, "float64") <= 1  # operands decoded to float32


@pytest.mark.parametrize(("method", "params"), [*METHODS, *QUANTIZED], ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)], ids=str)
def test_no_tokens(method, params, shape):
    y = loaded(method, numbers(1, 32, 64), (16, 16), **params)(torch.zeros(shape))
    assert y.shape == (*shape[:-1], 32)


@CPU_SCALED_MM
@pytest.mark.parametrize("activations", ["tensor", "token"])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
def test_no_tokens_by_name(activations, shape):
    bias = torch.ones(32, dtype=torch.bfloat16)
    params = {"granularity": "channel", "activations": activations, "path": "scaled_mm"}
    y = loaded("fp8", numbers(1, 32, 64), (16, 16), bias, **params)(torch.zeros(shape, dtype=torch.bfloat16))
    assert (y.shape, y.dtype) == ((*shape[:-1], 32), torch.bfloat16)


def test_no_tokens_of_block_formats():
    swizzled = {"activations": "group", "scale_layout": "swizzled_128x4"}
    for method, params in (("mxfp8", swizzled), ("nvfp4", {**swizzled, "scale_sharing": "common"})):
        layer = loaded(method, numbers(1, 32, 64), (16, 16), **params)
        x, bias = torch.zeros(2, 0, 64, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
        y = scaled_blocks.path(layer.quant_method.stored(layer), x, bias)
        assert (y.shape, y.dtype) == ((2, 0, 32), torch.bfloat16)


@pytest.mark.parametrize("path", ["auto", "matmul"])
@pytest.mark.parametrize(("method", "params"), [*METHODS, *QUANTIZED], ids=str)
def test_no_columns_leave_the_bias(method, params, path):
    if path == "matmul" and "activations" in params:
        pytest.skip("matmul leaves x as it is")
    bias = torch.arange(32.0)
    layer = loaded(method, numbers(1, 32, 0), (16, 16), bias, path=path, **params)
    assert torch.equal(layer(torch.zeros(2, 3, 0)), bias.expand(2, 3, 32))
    assert layer(torch.zeros(2, 0, 0)).shape == (2, 0, 32)


@pytest.mark.parametrize(("method", "params"), [*METHODS, *QUANTIZED], ids=str)
def test_batches_and_strides_are_rows(method, params):
    layer, x = loaded(method, numbers(1, 32, 64), (16, 16), **params), torch.from_numpy(numbers(2, 6, 64))
    flat = layer(x)
    assert torch.equal(layer(x.view(2, 3, 64)), flat.view(2, 3, 32))
    assert torch.equal(layer(x.t().contiguous().t()), flat)
    assert layer(x[0]).shape == (32,)


@pytest.mark.parametrize(("method", "params"), QUANTIZED, ids=str)
def test_a_value_that_is_no_number_makes_its_row_nan_and_no_other(method, params):
    x = torch.from_numpy(numbers(2, 4, 64))
    x[1, 5] = torch.inf
    bad = loaded(method, numbers(1, 32, 64), (16, 16), **params)(x).isnan()
    whole = params["activations"] == "tensor" or method == "nvfp4"  # there a scale covers all of x
    assert bad[1].all()
    assert bad[[0, 2, 3]].all() if whole else not bad[[0, 2, 3]].any()


def test_a_reload_is_seen_by_the_next_call():
    a, b = numbers(1, 32, 64), numbers(4, 32, 64)
    x = torch.from_numpy(numbers(2, 4, 64))
    for method, params in [*METHODS, *QUANTIZED]:
        layer = loaded(method, a, (16, 16), **params)
        first = layer(x)
        olq.reload(layer, {"weight": torch.from_numpy(b)})
        assert not torch.equal(layer(x), first)
        assert torch.equal(layer(x), loaded(method, b, (16, 16), **params)(x))
        assert forward.path(layer, x).name == "reference"
