"""Paths on a GPU: values, CUDA graphs before and after a reload, compilation, and no waiting for the device.

Tensor cores add E4M3 products of 32 columns with fewer bits than float32 keeps, then in float32: `TENSOR_CORES` bounds
that part of the error, as a share of S (see oracle). The bound of other paths is that of float32 sums.
"""

import numpy as np
import pytest
import torch
from forward.layers import DTYPES, loaded, numbers, rounded, split
from forward.oracle import input_values, product, sums, weight_values, worst

import olq
from olq import forward
from olq.kernels.plan_shares import row_limit

pytestmark = pytest.mark.cuda
TENSOR_CORES = 2.0**-10
ROWS = [
    ("fp8", {"granularity": g, "activations": a}) for g in ("tensor", "channel") for a in ("tensor", "token")
]
BLOCKS = [("fp8", {"granularity": "block", "activations": "group"})]
REFERENCE = [
    ("fp8", {"granularity": "block", "activations": "token"}),
    ("fp8", {"granularity": "channel", "activations": "group"}),
    ("mxfp8", {"activations": "group"}),
    ("nvfp4", {"activations": "group"}),
]
WEIGHT_ONLY = [
    ("fp8", {"granularity": "tensor"}),
    ("fp8", {"granularity": "channel"}),
    ("fp8", {"granularity": "block"}),
    ("mxfp8", {}),
    ("nvfp4", {}),
]
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
SHAPES = [
    (1, (16,), 16),
    (3, (100, 28), 100),
    (5, (130, 0, 30), 257),
    (17, (256,), 640),
    (130, (1,), 1024),
    (64, (48,), 96),
]


def on_gpu(method, w, parts, bias=None, **params):
    with torch.device("cuda"):
        layer = loaded(method, w, parts, None if bias is None else bias.cuda(), **params)
    assert layer.weight.is_cuda
    return layer


def few(method, x):
    """Whether a kernel keeps float32 scales for the sum, so that no weight is rounded."""
    return method != "mxfp8" and x.dtype != torch.float32 and len(x) <= row_limit(method)


def check(method, params, shape, dtype, bias, name, each=None):
    m, parts, k = shape
    w, x = numbers(1, sum(parts), k), rounded(numbers(2, m, k), DTYPES[dtype])
    b = rounded(numbers(3, sum(parts)), DTYPES[dtype]) if bias else None
    layer = on_gpu(method, w, parts, b, **params)
    assert forward.path(layer, x.cuda(), layer.bias).name == name
    y = layer(x.cuda()).cpu()
    assert (y.dtype, tuple(y.shape)) == (x.dtype, (m, sum(parts)))
    offset = None if b is None else b.double().numpy()
    weight = weight_values(method, split(w, parts), params)
    if params.get("activations", "none") == "none" and not few(method, x):  # decoded to the dtype of x
        weight = rounded(weight.astype(np.float32), DTYPES[dtype]).double().numpy()
    exact, magnitude = product(input_values(method, x.float().numpy(), params), weight, offset)
    error = worst(y.float().numpy(), exact, magnitude, each or sums(k), dtype, offset)
    assert error <= 1, f"{error} times the bound"


@HOPPER
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "params"), [*ROWS, *BLOCKS], ids=str)
def test_scaled_mm(method, params, shape, dtype, bias):
    check(method, params, shape, dtype, bias, "scaled_mm", TENSOR_CORES)


@pytest.mark.parametrize("shape", [(3, (100, 28), 100), (130, (1,), 1024), (64, (48,), 96)], ids=str)
@pytest.mark.parametrize(("method", "params"), [*ROWS, *BLOCKS, *REFERENCE], ids=str)
def test_reference_of_quantized_activations(method, params, shape):
    check(method, {**params, "path": "reference"}, shape, "bfloat16", True, "reference")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "params"), WEIGHT_ONLY, ids=str)
def test_weight_only(method, params, shape, dtype):
    check(method, params, shape, dtype, True, "matmul")


@pytest.mark.unaudited(reason="poisoning waits for the GPU, and makes generators, which a capture may not")
@pytest.mark.parametrize("m", [1, 3, 130])
@pytest.mark.parametrize(("method", "params"), [*WEIGHT_ONLY, *ROWS, *BLOCKS, *REFERENCE], ids=str)
def test_a_graph_captured_before_a_reload_computes_with_the_new_weights(method, params, m):
    a, b = numbers(1, 160, 384), numbers(4, 160, 384) * np.float32(3)
    bias = torch.from_numpy(numbers(3, 160)).bfloat16()
    layer, x = (
        on_gpu(method, a, (128, 32), bias, **params),
        rounded(numbers(2, m, 384), torch.bfloat16).cuda(),
    )
    before, captured, y = captured_call(layer, x)
    other = rounded(numbers(5, m, 384), torch.bfloat16).cuda()
    olq.reload(layer, {"weight": torch.from_numpy(b), "bias": -bias})
    x.copy_(other)
    captured.replay()
    fresh = on_gpu(method, b, (128, 32), -bias, **params)(other)
    assert not torch.equal(before, fresh)
    assert torch.equal(y, fresh)


def captured_call(layer, x):
    """The output of an eager call, a graph of another call, and that call's output."""
    before = layer(x).clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, before)
    return before, graph, y


@pytest.mark.unaudited(reason="poisoning waits for the GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
@pytest.mark.parametrize(("method", "params"), [*WEIGHT_ONLY, *ROWS, *BLOCKS, *REFERENCE], ids=str)
def test_no_call_waits_for_the_gpu(method, params):
    layer = on_gpu(method, numbers(1, 160, 200), (128, 32), **params)
    x = rounded(numbers(2, 5, 200), torch.bfloat16).cuda()
    layer(x)
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch 2.11 about itself
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("method", "params"), [*WEIGHT_ONLY, *ROWS, *BLOCKS, *REFERENCE], ids=str)
def test_compiles_without_a_break(method, params, dynamic):
    torch._dynamo.reset()
    forward.facts._CAPABILITIES.clear()  # as in a process whose first call is compiled
    layer = on_gpu(method, numbers(1, 160, 200), (128, 32), **params)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 8) if dynamic else (3,):
        x = rounded(numbers(2, m, 200), torch.bfloat16).cuda()
        assert torch.equal(compiled(x), layer(x))


@HOPPER
def test_scales_of_blocks_reach_their_rows_and_columns():
    """One part of W or of x that is larger than the rest by 2**10 changes its rows and columns and no others."""
    w, x = np.ones((256, 512), np.float32), np.ones((5, 512), np.float32)
    w[128:, 256:384] *= 1024
    x[3, 384:] *= 1024
    layer = on_gpu("fp8", w, (256,), granularity="block", activations="group")
    y = layer(torch.from_numpy(x).cuda()).cpu().double().numpy()
    assert np.allclose(y, x.astype(np.float64) @ w.T, rtol=TENSOR_CORES)
