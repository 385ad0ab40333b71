"""Every path under torch.compile without a graph break, with sizes that are static and dynamic."""

import pytest
import torch
from forward.layers import loaded, numbers
from forward.test_values import CPU_SCALED_MM, METHODS, QUANTIZED

ROWS = [
    {"granularity": g, "activations": a, "path": "scaled_mm"}
    for g in ("tensor", "channel")
    for a in ("tensor", "token")
]


def check(method, params, dynamic, backend="aot_eager"):
    torch._dynamo.reset()
    bias = torch.from_numpy(numbers(3, 31))
    layer = loaded(method, numbers(1, 31, 70), (16, 15), bias, **params)
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for m in (3, 8) if dynamic else (3,):
        x = torch.from_numpy(numbers(2, m, 70))
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("method", "params"), [*METHODS, *QUANTIZED], ids=str)
def test_reference(method, params, dynamic):
    check(method, params, dynamic)


def test_autocast():
    torch._dynamo.reset()
    layer = loaded("fp8", numbers(1, 32, 64), (32,), activations="token")
    x = torch.from_numpy(numbers(2, 3, 64))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("method", "params"), METHODS, ids=str)
def test_matmul(method, params, dynamic):
    check(method, {**params, "path": "matmul"}, dynamic)


@CPU_SCALED_MM
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("params", ROWS, ids=str)
def test_scaled_mm(params, dynamic):
    check("fp8", params, dynamic)
