"""Which path a call takes, why, how to ask for another, and what is said where there is none."""

import json
from pathlib import Path

import pytest
import torch
from forward.layers import loaded, numbers

import olq
from olq import forward
from olq.errors import ConfigError, LayoutError, StateError
from olq.forward import choice, rows
from olq.forward.facts import Input

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "forward.md"
TOKEN, GROUP = {"activations": "token"}, {"activations": "group"}
W = numbers(1, 32, 64)
X = torch.from_numpy(numbers(2, 4, 64))


def given(
    device="cuda",
    capability=(9, 0),
    dtype=torch.bfloat16,
    tokens=4,
    gradient=None,
    bias=None,
    autocast=False,
):
    return Input(torch.device(device), capability, dtype, tokens, gradient, bias, autocast)


def path_of(method, params, parts=(16, 16), **call):
    layer = loaded(method, W, parts, **params)
    return choice.explain(layer.quant_method.stored(layer), given(**call)).name


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch):
    """The table asks the build too, and this one may be for CPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "nvfp4"])
def test_weight_only_is_the_reference_on_a_cpu_and_the_operator_on_a_gpu(method):
    assert path_of(method, {}) == "matmul"
    assert path_of(method, {}, capability=(7, 5), dtype=torch.float32) == "matmul"
    assert path_of(method, {}, dtype=torch.float64) == "reference"
    assert path_of(method, {}, gradient="x that requires grad") == "reference"
    assert path_of(method, {}, dtype=torch.bfloat16, bias=torch.float32) == "reference"
    assert path_of(method, {}, autocast=True) == "reference"
    assert path_of(method, {}, device="cpu", capability=(0, 0)) == "reference"
    assert path_of(method, {"path": "matmul"}, device="cpu", capability=(0, 0)) == "matmul"
    assert path_of(method, {"path": "reference"}) == "reference"


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("activations", ["tensor", "token", "group"])
def test_scaled_mm_is_taken_on_hopper_where_scales_fit(granularity, activations):
    params = {"granularity": granularity, "activations": activations}
    fits = (granularity == "block") == (activations == "group")
    assert path_of("fp8", params) == ("scaled_mm" if fits else "reference")
    for capability in ((8, 0), (8, 9), (10, 0)):
        assert path_of("fp8", params, capability=capability) == "reference"
    assert path_of("fp8", params, tokens=0) == ("scaled_mm" if fits else "reference")


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_scaled_mm_by_rows_is_there_by_name_where_it_has_not_run(capability):
    params = {"activations": "token", "path": "scaled_mm"}
    assert path_of("fp8", params, capability=capability) == "scaled_mm"


@pytest.mark.parametrize("method", ["mxfp8", "nvfp4"])
def test_block_formats_take_scaled_mm_by_name_on_blackwell(method):
    params = {"activations": "group", "scale_layout": "swizzled_128x4"}
    assert path_of(method, params, (32,), capability=(10, 0)) == "reference"
    assert path_of(method, {**params, "path": "scaled_mm"}, (32,), capability=(10, 0)) == "scaled_mm"


def test_each_row_of_the_table_is_reached():
    """By one of the cases above; a row that no call takes would be a promise without a call."""
    asked = [
        ("fp8", {}, {}),
        ("fp8", {"path": "matmul"}, {"device": "cpu"}),
        ("fp8", {"activations": "token"}, {}),
        ("fp8", {"activations": "token", "path": "scaled_mm"}, {"capability": (10, 0)}),
        ("fp8", {"activations": "token", "path": "scaled_mm"}, {"device": "cpu"}),
        ("fp8", {"granularity": "block", "activations": "group"}, {}),
        ("mxfp8", {"activations": "group", "path": "scaled_mm"}, {"capability": (10, 0)}),
        ("nvfp4", {"activations": "group", "path": "scaled_mm"}, {"capability": (10, 0)}),
        ("fp8", {}, {"device": "cpu"}),
        ("nvfp4", {"activations": "group"}, {"device": "cpu"}),
    ]
    reached = []
    for method, params, call in asked:
        swizzled = {} if method == "fp8" else {"scale_layout": "swizzled_128x4"}
        layer = loaded(method, W, (32,), **swizzled, **params)
        reached.append(choice.choose(layer.quant_method.stored(layer), given(**call)))
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert reached == list(rows.TABLE)


def test_path_says_why():
    layer = loaded("fp8", W, (32,), activations="token")
    found = forward.path(layer, X)
    assert (found.name, found.how) == ("reference", "Q(x) and bands of W are decoded, in float32")
    assert found.reason.startswith("scaled_mm needs cuda 9.0 to below 10.0; the weight is on cpu; ")
    assert found.reason.endswith("scaled_mm is there by name alone: path='scaled_mm'")
    assert str(found) == f"reference ({found.how}): {found.reason}"
    asked = loaded("fp8", W, (32,), path="reference")
    assert forward.path(asked, X).reason == "asked for: path='reference'"


def test_path_looks_at_the_input_only():
    layer = loaded("fp8", W, (32,), activations="token")
    x = torch.empty(7, 3, 64, dtype=torch.bfloat16, device="meta")
    assert forward.path(layer, x) == forward.path(layer, x.expand(7, 3, 64))


def test_a_gradient_is_refused_where_there_is_none():
    x = X.clone().requires_grad_()
    loaded("fp8", W, (32,))(x).sum().backward()
    assert x.grad is not None
    layer = loaded("fp8", W, (32,), activations="token")
    with pytest.raises(ConfigError) as raised:
        layer(x)
    text = str(raised.value)
    assert text.startswith("No path computes this call.\n  where:  Layer.weight\n")
    assert "found:  x of 4 rows in torch.float32 on cpu" in text
    assert "reference needs no gradient; found x that requires grad, in grad mode" in text
    assert (
        "remedy: take path='auto' and activations='none', whose reference has a gradient, or call it" in text
    )
    with torch.no_grad():
        assert layer(x).shape == (4, 32)


def test_a_path_that_was_asked_for_and_is_not_there_raises():
    layer = loaded("fp8", W, (32,), activations="group", granularity="block", path="scaled_mm")
    for ask in (lambda: layer(X), lambda: forward.path(layer, X)):
        with pytest.raises(ConfigError) as raised:
            ask()
        text = str(raised.value)
        assert text.startswith("The path 'scaled_mm' can't compute this call.\n  where:  Layer.weight\n")
        assert "need:   scaled_mm needs cuda 9.0 to below 10.0; the weight is on cpu\n" in text
        assert (
            "remedy: leave `path` at 'auto', or meet one of the needs; olq.forward.table() prints them"
            in text
        )


@pytest.mark.parametrize(
    ("method", "params", "call", "need"),
    [
        ("fp8", TOKEN, {"dtype": torch.float64}, "needs x in bfloat16, float16, float32; it is float64"),
        ("fp8", TOKEN, {"capability": (8, 0)}, "needs cuda 8.9 and later; this GPU has 8.0"),
        ("fp8", TOKEN, {"bias": torch.float32}, "needs a bias in the dtype of x; found a bias in float32"),
        ("mxfp8", GROUP, {"capability": (9, 0)}, "needs cuda 10.0 and later; this GPU has 9.0"),
        ("mxfp8", GROUP, {"capability": (10, 0)}, "needs scale_layout=swizzled_128x4; found scale_layout=linear"),
        (
            "nvfp4", {**GROUP, "scale_layout": "swizzled_128x4"}, {"capability": (10, 0)},
            "needs one tensor scale; found 2 scales; scale_sharing=common gives one",
        ),
    ],
)  # fmt: skip
def test_each_need_is_named(method, params, call, need):
    with pytest.raises(ConfigError, match="can't compute this call") as raised:
        path_of(method, {**params, "path": "scaled_mm"}, **call)
    assert need in raised.value.need


def test_builds_that_lack_something_are_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ConfigError) as raised:
        path_of("fp8", {"granularity": "block", "activations": "group", "path": "scaled_mm"})
    assert "needs a torch for CUDA 12.9 or later; found torch for CUDA 12.8" in raised.value.need
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError) as raised:
        path_of("fp8", {"activations": "token", "path": "scaled_mm"})
    assert "needs CUDA, not ROCm; found a ROCm build" in raised.value.need


def test_parameters_that_no_device_has_a_path_for_are_refused_at_once():
    with pytest.raises(ConfigError) as raised:
        olq.get_method("fp8", path="scaled_mm")
    assert str(raised.value) == (
        "No device has such a path for a method with these parameters.\n"
        "  where:  method 'fp8': path\n"
        "  found:  path='scaled_mm', activations='none'\n"
        "  need:   matmul or reference, or parameters that 'scaled_mm' is for: "
        "fp8: granularity=tensor|channel, activations=tensor|token; fp8: granularity=block, activations=group\n"
        "  remedy: leave `path` at 'auto', or set `activations` and the scales of the weight to what the path takes"
    )
    for params in ({"path": "scaled_mm", "activations": "group"}, {"path": "matmul", "activations": "token"}):
        with pytest.raises(ConfigError, match="No device has such a path"):
            olq.get_method("fp8", **params)
    with pytest.raises(ConfigError, match="can't take this value"):
        olq.get_method("fp8", path="cublas")


def test_rules_choose_paths_layer_by_layer():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    rule = olq.Rule(match="1", method="fp8", params={"activations": "token", "path": "reference"})
    olq.prepare(model, olq.QuantConfig(method="fp8", rules=[rule]))
    x = torch.ones(1, 32)
    assert forward.path(model[1], x).reason == "asked for: path='reference'"
    assert "by name alone: path='matmul'" in forward.path(model[0], x).reason


def test_the_tag_of_saved_bytes_is_what_it_was():
    layer = loaded("fp8", W, (16, 16), activations="token", path="reference")
    plain = loaded("fp8", W, (16, 16))
    assert bytes(layer.weight_format) == bytes(plain.weight_format)
    assert json.loads(bytes(plain.weight_format)) == {
        "method": "fp8",
        "params": {
            "granularity": "channel",
            "nonfinite": "error",
            "scale": "float32",
            "scale_sharing": "part",
            "source_precision": "parameter",
        },
        "shape": [32, 64],
        "parts": [16, 16],
        "dtype": "float32",
    }
    assert "activations" not in bytes(loaded("nvfp4", W, (32,), activations="group").weight_format).decode()


def test_saved_bytes_load_into_a_layer_that_computes_otherwise():
    saved = loaded("fp8", W, (16, 16)).state_dict()
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    olq.prepare(model, olq.QuantConfig(method="fp8", params={"activations": "token"}))
    other = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    other[0].weight.data.copy_(torch.from_numpy(W))
    olq.prepare(other, olq.QuantConfig(method="fp8"))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(model[0].weight, saved["weight"])
    assert not torch.equal(model(X), other(X))


def test_shapes_that_do_not_fit_are_refused():
    layer = loaded("fp8", W, (32,))
    with pytest.raises(LayoutError) as raised:
        layer(torch.ones(2, 63))
    assert str(raised.value) == (
        "The input has not as many columns as the weight.\n  where:  Layer.weight\n  found:  x of shape [2, 63]\n"
        "  need:   [..., 64]\n  remedy: pass the activations of this layer, features last"
    )
    experts = torch.nn.Module()
    method = olq.get_method("fp8")
    method.create_weights(experts, 64, 32, dtype=torch.float32, lead=(2,), label="experts")
    olq.load(experts, {"weight": torch.ones(2, 32, 64)})
    with pytest.raises(LayoutError, match="is several matrices") as raised:
        method.apply(experts, X)
    assert raised.value.remedy.startswith("decode the experts with olq.dequantize")


def test_a_layer_without_weights_has_no_path():
    layer = torch.nn.Module()
    layer.quant_method = olq.get_method("fp8")
    layer.quant_method.create_weights(layer, 64, 32, dtype=torch.float32)
    with pytest.raises(StateError, match="before its weights were complete"):
        forward.path(layer, X)


def test_a_layer_without_a_method_is_named():
    with pytest.raises(LayoutError, match="no path was chosen for it") as raised:
        forward.path(torch.nn.Linear(64, 32), X)
    assert raised.value.where == "Linear"
    with pytest.raises(LayoutError, match="has no such quantized weight"):
        forward.path(loaded("fp8", W, (32,)), X, name="w13")


def test_autocast_is_followed_where_x_stays_as_it_is_and_nowhere_else():
    plain, quantized = loaded("fp8", W, (32,)), loaded("fp8", W, (32,), activations="token")
    named = loaded("fp8", W, (32,), path="matmul")
    products = [quantized]
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # the first with scaled_mm on a CPU
        products.append(loaded("fp8", W, (32,), activations="token", path="scaled_mm"))
    exact = [layer(X) for layer in products]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain(X).dtype == torch.bfloat16
        assert all(torch.equal(layer(X), y) for layer, y in zip(products, exact, strict=True))
        with pytest.raises(ConfigError) as raised:
            named(X)
    assert "needs no autocast; found torch.autocast, which F.linear follows" in raised.value.need


def test_a_method_of_another_package_is_the_reference():
    class Other(olq.get_method("fp8").__class__):
        name = "other"

    layer = torch.nn.Module()
    layer.quant_method = Other()
    layer.quant_method.create_weights(layer, 64, 32, dtype=torch.float32)
    olq.load(layer, {"weight": torch.from_numpy(W)})
    stored = layer.quant_method.stored(layer)
    assert choice.explain(stored, given()).name == "reference"


def test_the_page_shows_the_table():
    assert f"```text\n{forward.table()}\n```" in PAGE.read_text(encoding="utf-8")
