"""Partial reloads: what the scope covers is loaded, everything else keeps every bit and is listed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import olq
from olq.errors import ConfigError, CoverageError, StateError, UnknownNameError
from reload.small_models import TOKENS, Small, as_bytes, live, places, state

NAMES = ["emb.weight", "a.weight", "a.bias", "b.weight", "head.weight"]


def other() -> dict[str, torch.Tensor]:
    """Another checkpoint of `Small`."""
    return state(Small())


@settings(max_examples=25)
@given(chosen=st.sets(st.sampled_from(NAMES), min_size=1), shadow=st.sampled_from((None, "device", "host")))
def test_what_the_scope_covers_equals_a_full_load_and_the_rest_keeps_every_bit(chosen, shadow):
    model, weights = live(), other()
    before, at = as_bytes(model), places(model)
    wanted = live()
    olq.load(wanted, weights)
    report = olq.reload(
        model, {n: w for n, w in weights.items() if n in chosen}, scope=sorted(chosen), shadow=shadow
    )
    after, full = as_bytes(model), as_bytes(wanted)
    for name in after:
        weight = name.removesuffix("_scale").removesuffix("_format")
        assert after[name] == (full if weight in chosen else before)[name], name
    assert places(model) == at
    assert set(report.stale) == set(NAMES) - chosen
    assert all(f"stale: {name} (outside the scope of this load)" in report.table() for name in report.stale)
    model(TOKENS)


@pytest.mark.parametrize("scope", [["a"], ["a.*"], [r"re:a\..*"], ["a.weight", "a.bias"]], ids=str)
def test_a_scope_is_given_by_modules_parameters_or_expressions(scope):
    model, weights = live(), other()
    report = olq.reload(model, {n: weights[n] for n in ("a.weight", "a.bias")}, scope=scope)
    assert set(report.stale) == {"emb.weight", "b.weight", "head.weight"}


def test_the_status_counts_elements_of_the_model_whatever_stores_them():
    model = live(olq.QuantConfig(method="nvfp4"))
    session = olq.session(model, scope=["a"]).begin()
    session.feed("a.bias", other()["a.bias"])
    rows = {one.name: (one.state, one.arrived, one.total) for one in session.status().tensors}
    assert rows == {
        "a.weight": ("missing", 0, 48 * 32),
        "a.bias": ("arrived", 48, 48),
        "b.weight": ("stale", 0, 32 * 48),
        "emb.weight": ("stale", 0, 50 * 32),
        "head.weight": ("stale", 0, 50 * 32),
    }
    assert "1 arrived, 1 missing, 3 stale" in str(session.status())
    session.abort()


def test_names_outside_the_scope_are_refused_before_anything_is_written():
    model = live()
    before = as_bytes(model)
    with pytest.raises(UnknownNameError, match=r"3 names are outside the scope.*\n.*\n.*emb\.weight"):
        olq.reload(model, other(), scope=["a"])
    assert as_bytes(model) == before
    model(TOKENS)


def test_a_name_outside_the_scope_is_refused_at_its_feed_and_what_came_before_stays_good():
    model, weights = live(), other()
    with olq.session(model, scope=["a"]) as session:
        session.feed("a.weight", weights["a.weight"])
        with pytest.raises(UnknownNameError, match=r"outside the scope.*\n.*where: +feed"):
            session.feed("b.weight", weights["b.weight"])
        session.feed("a.bias", weights["a.bias"])
    wanted = live()
    olq.load(wanted, weights)
    assert as_bytes(model)["a.weight"] == as_bytes(wanted)["a.weight"]


def test_a_pattern_of_the_scope_that_matches_nothing_is_an_error_with_close_names():
    model = live()
    with pytest.raises(ConfigError, match=r"matches nothing.*\n.*scope\n.*'heat'[\s\S]*head"):
        olq.session(model, scope=["a", "heat"]).begin()
    with pytest.raises(ConfigError, match="no pattern at all"):
        olq.session(model, scope=[]).begin()
    model(TOKENS)


def test_what_is_missing_inside_the_scope_is_named():
    model = live()
    with pytest.raises(CoverageError, match=r"a\.bias"):
        olq.reload(model, {"a.weight": other()["a.weight"]}, scope=["a"])


@pytest.mark.parametrize("scope", [["a"], ["emb"]])
def test_no_layer_can_be_called_while_a_partial_load_is_open(scope):
    model = live()
    session = olq.session(model, scope=scope).begin()
    with pytest.raises(StateError, match="called before its weights were complete"):
        model(TOKENS)
    with pytest.raises(StateError, match="called before its weights were complete"):
        model.b(torch.randn(1, 48))
    session.abort()
    model(TOKENS)


@pytest.mark.parametrize(("scope", "name"), [(["a"], "a.bias"), (["emb"], "emb.weight")])
def test_an_aborted_partial_load_leaves_a_model_that_says_what_was_touched(scope, name):
    """Also where only a parameter in high precision was touched, whose own module can't refuse a call."""
    model, weights = live(), other()
    at = places(model)
    session = olq.session(model, scope=scope).begin()
    session.feed(name, weights[name])
    assert session.touched == (name,)
    session.abort()
    with pytest.raises(StateError, match=rf"after it had written 1 parameters: {name}"):
        model(TOKENS)
    with pytest.raises(
        StateError, match=r"A partial load needs a model that can be called.*\n.*\n.*written 1"
    ):
        olq.reload(model, {name: weights[name]}, scope=scope)
    olq.reload(model, weights)
    wanted = live()
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)
    assert places(model) == at


def test_generations_go_up_only_where_something_was_loaded():
    model, weights = live(), other()
    was = {name: getattr(model, name).quant_state.generation for name in ("a", "b")}
    olq.reload(model, {n: weights[n] for n in ("a.weight", "a.bias")}, scope=["a"])
    assert model.a.quant_state.generation == was["a"] + 1
    assert model.b.quant_state.generation == was["b"]
    assert model.quant_generation == 1


def test_tied_parameters_are_covered_together():
    model = olq.prepare(Small(tie=True))
    weights = state(Small(tie=True))
    report = olq.reload(model, {"emb.weight": weights["emb.weight"]}, scope=["emb"])
    assert "head.weight" not in report.stale
    wanted = olq.prepare(Small(tie=True))
    olq.load(wanted, weights)
    assert as_bytes(model)["head.weight"] == as_bytes(wanted)["head.weight"]


class Engine(nn.Module):
    """Two layers and a norm, loaded by a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second"):
            layer = nn.Module()
            layer.quant_method = olq.get_method("mxfp8")
            layer.quant_method.create_weights(layer, 32, 16, dtype=torch.bfloat16)
            self.add_module(name, layer)
        self.norm = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))

    def load_weights(self, weights) -> None:
        """Copy each tensor into the parameter of its name."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def test_a_models_own_loop_cant_write_outside_the_scope():
    model = Engine()
    weights = {
        "first.weight": torch.randn(16, 32).bfloat16(),
        "second.weight": torch.randn(16, 32).bfloat16(),
        "norm": torch.randn(16).bfloat16(),
    }
    olq.load(model, weights)
    before = as_bytes(model)
    for name in ("second.weight", "norm"):
        tensor = torch.zeros(16, 32) if name != "norm" else torch.zeros(16)
        with pytest.raises(CoverageError, match=rf"outside the declared scope[\s\S]*{name}"):
            olq.reload(model, [(name, tensor.bfloat16())], scope=["first"], replay=False)
    assert as_bytes(model) == before
    olq.reload(model, [("first.weight", weights["second.weight"])], scope=["first"], replay=False)
    assert as_bytes(model)["first.weight"] == before["second.weight"]
    assert as_bytes(model)["second.weight"] == before["second.weight"]
