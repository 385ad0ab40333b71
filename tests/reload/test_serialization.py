"""State dicts: of checkpoints and of live models, through load_state_dict, olq.load and safetensors."""

from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, LayoutError, NonFiniteError, SourceError, StateError, UnknownNameError
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state

LOADS = {"load": olq.load, "load_state_dict": lambda model, weights: model.load_state_dict(weights)}
EACH_LOAD = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
METHODS = ["fp8", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_model_loads_without_quantizing(method, tmp_path, monkeypatch):
    config = olq.QuantConfig(method=method)
    model = live(config)
    saved = model.state_dict()
    assert {type(t) for t in saved.values()} == {Tensor}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    monkeypatch.setattr(type(model.a.quant_method), "quantize_", lambda *_: pytest.fail("quantized again"))
    for load in (
        lambda other: olq.load(other, tmp_path),
        lambda other: olq.load(other, saved),
        lambda other: other.load_state_dict(saved),
    ):
        other = fresh(config)
        load(other)
        assert as_bytes(other) == as_bytes(model)
        assert torch.equal(other(TOKENS), model(TOKENS))
        before = places(other)
        load(other)  # and again, into the live model
        assert places(other) == before


WRONG = {
    "another method": (olq.QuantConfig(method="mxfp8"), {}),
    "another rule": (olq.QuantConfig(params={"scale": "power_of_two"}), {}),
    "another dtype": (olq.QuantConfig(), {"dtype": torch.float16}),
}


@EACH_LOAD
@pytest.mark.parametrize(("config", "options"), WRONG.values(), ids=WRONG)
def test_saved_bytes_that_mean_something_else_are_refused_before_one_is_written(load, config, options):
    model, other = live(), live(config, **options)
    before, logits = as_bytes(model), model(TOKENS)
    with pytest.raises(LayoutError, match="A saved quantized tensor does not fit this layer"):
        load(model, other.state_dict())
    assert as_bytes(model) == before
    assert torch.equal(model(TOKENS), logits)


@EACH_LOAD
@pytest.mark.parametrize(
    "dropped",
    [
        ["a.weight_scale"],
        ["a.weight_format"],
        ["a.weight"],
        ["a.bias"],
        ["emb.weight"],
        ["a.weight_scale", "b.weight"],
    ],
)
def test_what_is_missing_of_a_saved_model_is_named(load, dropped):
    saved = {name: t for name, t in live().state_dict().items() if name not in dropped}
    with pytest.raises(CoverageError) as caught:
        load(fresh(), saved)
    assert all(name in str(caught.value) for name in dropped)


@EACH_LOAD
def test_codes_without_tag_and_scales_are_refused(load):
    saved = {n: t for n, t in live().state_dict().items() if not n.endswith(("_format", "_scale"))}
    with pytest.raises(CoverageError, match=r"a\.weight_scale, a\.weight_format"):
        load(fresh(), saved)


@EACH_LOAD
def test_a_checkpoint_may_be_quantized_by_layer(load):
    saved, weights = live().state_dict(), state(Small())
    mixed = {**weights, **{name: t for name, t in saved.items() if name.startswith("b.")}}
    model = fresh()
    load(model, mixed)
    assert torch.equal(model.b.weight, saved["b.weight"])


BAD = {
    "shape": ("a.weight", lambda t: t[:7], SourceError, "shape \\[7, 32\\]"),
    "bias shape": ("a.bias", lambda t: t[:9], SourceError, "shape \\[9\\]"),
    "codes": ("a.weight", lambda t: t.to(torch.float8_e4m3fn), SourceError, "already quantized or packed"),
    "codes for a bias": ("a.bias", lambda t: t.to(torch.float8_e5m2), SourceError, "already quantized"),
    "integers": ("a.weight", lambda t: t.to(torch.int32), LayoutError, r"torch\.int32"),
    "meta": ("a.weight", lambda t: t.to("meta"), SourceError, "it has no values"),
    "nan": ("b.weight", lambda t: t.fill_(float("nan")), NonFiniteError, r"b.weight\[0, 0\]"),
}


@EACH_LOAD
@pytest.mark.parametrize(("name", "spoil", "kind", "text"), BAD.values(), ids=BAD)
def test_a_bad_tensor_is_named_and_the_next_full_load_is_a_fresh_one(load, name, spoil, kind, text):
    model, weights = live(), state(Small())
    bad = {**weights, name: spoil(weights[name].clone())}
    with pytest.raises(kind, match=text):
        load(model, bad)
    load(model, weights)
    wanted = fresh()
    load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)


def test_load_state_dict_checks_before_it_writes():
    model, weights = live(), state(Small())
    before = as_bytes(model)
    for name in ("shape", "codes", "bias shape"):
        key, spoil, kind, _ = BAD[name]
        with pytest.raises(kind):
            model.load_state_dict({**weights, key: spoil(weights[key].clone())})
        assert as_bytes(model) == before
        model(TOKENS)


def test_strict_and_assign_mean_what_torch_says_as_far_as_they_can():
    model, weights = fresh(), state(Small())
    with pytest.raises(UnknownNameError, match=r"'a\.wieght' \(did you mean 'a\.weight'"):
        model.load_state_dict({**weights, "a.wieght": weights["a.weight"]})
    result = model.load_state_dict({**weights, "extra": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["extra"]
    assert not result.missing_keys
    with pytest.raises(StateError, match="assign=True would replace parameters"):
        model.load_state_dict(weights, assign=True)
    del weights["b.weight"]
    with pytest.raises(CoverageError, match=r"b.weight \(nothing arrived\)"):
        model.load_state_dict(weights, strict=False)


class Stateful(nn.Module):
    """Hooks, extra state, versions: what torch's own loading serves."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 8)
        self.norm = nn.BatchNorm1d(8)
        self.extra, self.events = 1, []
        self.register_load_state_dict_pre_hook(self.before)
        self.register_load_state_dict_post_hook(lambda module, keys: self.events.append("after"))

    def before(self, module, state_dict, prefix, metadata, *_) -> None:
        self.events.append(("before", metadata.get("version")))
        if prefix + "old.weight" in state_dict:
            state_dict[prefix + "linear.weight"] = state_dict.pop(prefix + "old.weight")

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.extra)

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = int(state)


def test_hooks_extra_state_and_versions_of_modules_are_served():
    source = Stateful()
    source.extra = 7
    weights = source.state_dict()
    weights["old.weight"] = weights.pop("linear.weight")
    with olq.meta_parameters():
        model = olq.prepare(Stateful())
    model.load_state_dict(weights)
    assert model.extra == 7
    assert model.events == [("before", 3), "after"]
    direct = olq.prepare(source)
    assert torch.equal(model.linear.weight, direct.linear.weight)
    weights.pop("_extra_state")
    with pytest.raises(CoverageError, match="_extra_state"):
        model.load_state_dict(weights)
    model.load_state_dict(weights, strict=False)
    assert model.load_state_dict(OrderedDict(model.state_dict())).missing_keys == []


@pytest.mark.parametrize("source", [Small, live])
def test_a_part_or_a_wrapper_refuses_a_state_dict_and_takes_it_through_load(source):
    model = nn.Sequential(live())
    codes = {name: data for name, data in as_bytes(model).items() if "weight" in name and "emb" not in name}
    weights = source().state_dict()
    olq_part = model[0].__dict__.pop("load_state_dict")  # as a part that was prepared with its parent
    for module, prefix in ((model, "0."), (model[0], "")):
        with pytest.raises(
            StateError, match="A state dict was loaded into a quantized layer without a session"
        ):
            module.load_state_dict({prefix + name: t for name, t in weights.items()}, strict=False)
        assert {name: data for name, data in as_bytes(model).items() if name in codes} == codes
        olq.load(module, {prefix + name: t for name, t in weights.items()})
        codes = {name: data for name, data in as_bytes(model).items() if name in codes}
    wanted = fresh()
    olq_part(weights)
    wanted.load_state_dict(weights)
    assert as_bytes(model[0]) == as_bytes(wanted)
