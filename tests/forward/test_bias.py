"""What a call does with its bias: shapes and dtypes that fit, gradients and tangents, one rounding."""

import pytest
import torch
from forward.layers import loaded, numbers, rounded
from torch.autograd import forward_ad

import olq
from olq import forward
from olq.errors import ConfigError, LayoutError
from olq.forward import scaled_fp8

CPU_SCALED_MM = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="scaled_mm on a CPU needs torch 2.13"
)
#: torch compiles its rules of forward mode with it.
SCRIPTS = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
W, X = numbers(1, 32, 64), torch.from_numpy(numbers(2, 4, 64))
TOKEN = {"activations": "token"}
WAYS = [{}, {"path": "matmul"}, TOKEN, pytest.param({**TOKEN, "path": "scaled_mm"}, marks=CPU_SCALED_MM)]


@pytest.mark.parametrize("params", WAYS, ids=str)
@pytest.mark.parametrize("shape", [(33,), (31,), (1,), (1, 32), ()], ids=str)
def test_a_bias_of_another_shape_is_refused_by_every_path(params, shape):
    layer = loaded("fp8", W, (16, 16), **params)
    for ask in (layer.quant_method.apply, forward.path):
        with pytest.raises(LayoutError) as raised:
            ask(layer, X, torch.zeros(shape))
        assert str(raised.value) == (
            "The bias has not one element for each row of the weight.\n  where:  Layer.weight\n"
            f"  found:  a bias of shape {list(shape)}\n  need:   [32]\n"
            "  remedy: pass the bias of this layer; a fused layer has one bias, the parts' one after the other"
        )


def test_a_bias_of_another_dtype_is_refused_where_it_would_not_be_added():
    plain, quantized = loaded("fp8", W, (32,)), loaded("fp8", W, (32,), **TOKEN)
    with pytest.raises(LayoutError) as raised:
        plain.quant_method.apply(plain, X, torch.zeros(32, dtype=torch.bfloat16))
    assert str(raised.value) == (
        "The bias has not a dtype in which it can be added.\n  where:  Layer.weight\n"
        "  found:  a bias in bfloat16, x in float32\n  need:   a bias in float32\n"
        "  remedy: convert the bias, or x, before the call: bias.to(x.dtype)"
    )
    with pytest.raises(LayoutError) as raised:
        quantized.quant_method.apply(quantized, X, torch.zeros(32, dtype=torch.int32))
    assert raised.value.need == "a bias in bfloat16, float16, float32, float64"
    half = torch.ones(32, dtype=torch.bfloat16)
    assert torch.equal(quantized.quant_method.apply(quantized, X, half), quantized(X) + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which converts operands itself
        assert plain.quant_method.apply(plain, X, half).dtype == torch.bfloat16


def test_a_bias_that_requires_grad_gets_one_through_a_stack():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    olq.prepare(model, olq.QuantConfig(method="fp8"))
    assert all(model[i].bias.requires_grad for i in (0, 2))
    model(X).sum().backward()
    assert torch.equal(model[2].bias.grad, torch.full((16,), 4.0))
    hidden = torch.nn.functional.linear(X, olq.dequantize(model[0]).float(), model[0].bias) > 0
    want = (olq.dequantize(model[2]).float().sum(0) * hidden).sum(0)
    torch.testing.assert_close(model[0].bias.grad, want)


def test_a_bias_that_requires_grad_is_a_reason_in_grad_mode_only():
    bias = torch.ones(32, requires_grad=True)
    layer = loaded("fp8", W, (32,), path="matmul")
    with pytest.raises(ConfigError) as raised:
        layer.quant_method.apply(layer, X, bias)
    need = "matmul needs no gradient; found a bias that requires grad, in grad mode"
    assert need in raised.value.need
    assert raised.value.remedy == (
        "take path='auto' and activations='none', whose reference has a gradient, or call it without: "
        "under torch.no_grad(), and with no tangents"
    )
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert forward.path(layer, X, bias).name == "matmul"
            assert layer.quant_method.apply(layer, X, bias).shape == (4, 32)


@pytest.mark.parametrize("params", WAYS[2:], ids=str)
def test_quantized_activations_give_a_bias_no_gradient(params):
    layer, bias = loaded("fp8", W, (32,), **params), torch.ones(32, requires_grad=True)
    y = layer.quant_method.apply(layer, X, bias)
    assert not y.requires_grad
    assert torch.equal(y, layer.quant_method.apply(layer, X, bias.detach()))


def test_stacks_of_quantized_activations_run_in_grad_mode():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    olq.prepare(model, olq.QuantConfig(method="fp8", params=TOKEN))
    assert not model(X).requires_grad


@SCRIPTS
def test_tangents_flow_through_the_reference():
    layer, bias, direction = loaded("fp8", W, (32,)), torch.ones(32), torch.from_numpy(numbers(3, 4, 64))
    w = olq.dequantize(layer).float()
    _, tangent = torch.func.jvp(lambda x: layer.quant_method.apply(layer, x, bias), (X,), (direction,))
    torch.testing.assert_close(tangent, direction @ w.T)
    _, tangent = torch.func.jvp(lambda b: layer.quant_method.apply(layer, X, b), (bias,), (2 * bias,))
    assert torch.equal(tangent, torch.full((4, 32), 2.0))


@SCRIPTS
@pytest.mark.parametrize("params", WAYS[1:], ids=str)
def test_tangents_are_refused_where_they_would_be_lost(params):
    layer, bias = loaded("fp8", W, (32,), **params), torch.ones(32)
    with forward_ad.dual_level(), torch.no_grad():
        x, dual = forward_ad.make_dual(X, X), forward_ad.make_dual(bias, bias)
        for what, call in (("x", (x, bias)), ("a bias", (X, dual))):
            with pytest.raises(ConfigError) as raised:
                layer.quant_method.apply(layer, *call)
            need = f"needs no gradient; found {what} with a tangent of torch.autograd.forward_ad"
            assert need in raised.value.need
        assert layer.quant_method.apply(layer, X, bias).shape == (4, 32)
    for call in (lambda x: layer.quant_method.apply(layer, x), layer):
        with pytest.raises(ConfigError, match="with a tangent"):
            torch.func.jvp(call, (X,), (X,))


@CPU_SCALED_MM
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("way", ["dense", "steps", "one"])
def test_scaled_mm_adds_the_bias_before_the_one_rounding(granularity, way):
    """N is no multiple of 16, and the bias is so near the product's negative that a rounding between them shows."""
    params = {"granularity": granularity, "activations": "tensor", "path": "scaled_mm"}
    w, x = numbers(1, 37, 64), rounded(numbers(2, scaled_fp8.FEW_ROWS + 6, 64), torch.bfloat16)
    layer = loaded("fp8", w, (37,), **params)
    y = layer.quant_method.apply(layer, x, None).float()
    long = -y[:, :1].repeat(1, 2 * 37)[0].bfloat16() * torch.linspace(0.9, 1.1, 74).bfloat16()
    bias = {"dense": long[:37].clone(), "steps": long[::2], "one": long[:1].expand(37)}[way]
    want = (layer.quant_method.apply(layer, x.float(), None) + bias.float()).bfloat16()
    found = layer.quant_method.apply(layer, x, bias)
    assert torch.equal(found, want)


def test_scaled_mm_refuses_negative_parts():
    codes, scale = torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 1)
    for parts, starts in (([40, -8], [0, 40]), ([16, 16], [-16, 0])):
        with pytest.raises(LayoutError) as raised:
            torch.ops.olq.scaled_mm_fp8(X, codes, scale, None, parts, starts, "token", False)
        assert raised.value.need == "one part or more, within 32 rows, and no negative number"
