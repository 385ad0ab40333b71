"""The field's rule: the literal sequence of torch calls, for each dtype and layout, gives the same bytes."""

from itertools import product

import pytest
import torch
from torch import nn

from olq.reload.dummy import dummy_init, dummy_init_tensor
from olq.reload.region import whole
from reload.plans import METHODS, RegionLayer, kernel_bytes, load_by, method_id

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "columns": lambda t: t[:, 3:20],
    "strided": lambda t: t[::2, ::3],
    "one": lambda t: t[0, 0],
}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def by_torch(param: torch.Tensor, low: float, high: float, seed: int) -> None:
    """What the field does to one parameter."""
    generator = torch.Generator(device=param.device)
    generator.manual_seed(seed)
    if torch.finfo(param.dtype).bits < 16:
        scratch = torch.empty_like(param, dtype=torch.float16).uniform_(low, high, generator=generator)
        param.copy_(scratch)
    else:
        param.uniform_(low, high, generator=generator)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_torchs_own(device, dtype):
    for name, bounds in product(LAYOUTS, [(-1e-3, 1e-3), (-0.25, 3.0)]):
        mine, theirs = (torch.zeros(40, 70, device=device).to(dtype) for _ in range(2))
        dummy_init_tensor(LAYOUTS[name](mine), *bounds, 77, compat="vllm", name="weight_scale")
        by_torch(LAYOUTS[name](theirs), *bounds, 77)
        assert same_bytes(mine, theirs), (name, bounds)
        assert mine.float().unique().numel() > (name != "one"), "something was drawn"


def test_what_is_no_float_is_left():
    for tensor in (torch.tensor([5, 7]), torch.tensor([True]), torch.ones(2, dtype=torch.complex64)):
        before = tensor.clone()
        assert dummy_init_tensor(tensor, compat="vllm") == "left: not a floating type"
        assert torch.equal(tensor, before)


def test_a_model_gets_equal_values_for_equal_shapes_and_all_floats_are_drawn():
    model = nn.Module()
    for name, shape in {"a": (4, 6), "b": (4, 6), "weight_scale": (4, 1), "constant": ()}.items():
        model.register_parameter(name, nn.Parameter(torch.ones(shape)))
    model.register_buffer("mean", torch.ones(4, 6))
    model.register_buffer("inv_freq", torch.ones(4), persistent=False)
    report = dummy_init(model, compat="vllm")
    assert same_bytes(model.a, model.b)
    assert same_bytes(model.a, model.mean)
    for name in ("a", "b", "weight_scale", "constant", "mean"):
        want = torch.empty_like(getattr(model, name))
        by_torch(want, -1e-3, 1e-3, 1234)
        assert same_bytes(getattr(model, name), want)
        assert report.tensors[name] == "uniform between -0.001 and 0.001 by vLLM's rule: floats"
    assert (model.inv_freq == 1).all()


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_quantized_layers_are_quantized_from_the_fields_values(method):
    layer = RegionLayer(*method, (40, 24), 96)
    dummy_init(layer, compat="vllm")
    source = torch.empty(64, 96, dtype=torch.bfloat16)
    by_torch(source, -1e-3, 1e-3, 1234)
    twin = load_by(RegionLayer(*method, (40, 24), 96), source, [whole(source.shape)])
    assert kernel_bytes(layer) == kernel_bytes(twin)
