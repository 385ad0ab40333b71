"""Tied parameters and shared modules: every name, any order, one value."""

import copy

import pytest
import torch
from torch import nn

import olq
from olq.errors import CoverageError
from reload.small_models import Small, as_bytes, fresh, state

CONFIGS = {"head quantized": olq.QuantConfig(), "head kept": olq.QuantConfig(keep=["head"])}
TIED = ("emb.weight", "head.weight")
LOADS = {
    "mapping": olq.load,
    "iterator": lambda model, weights: olq.load(model, iter(weights.items())),
    "load_state_dict": lambda model, weights: model.load_state_dict(weights),
}
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
EACH_ORDER = pytest.mark.parametrize("head_first", [False, True])
EACH_LOAD = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def checkpoint(model: nn.Module, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The model's state with the tied parameter under these names only, in this order, first."""
    whole = state(model)
    rest = {name: t for name, t in whole.items() if name not in TIED}
    return {**{name: whole[name] for name in names}, **rest}


@EACH_LOAD
@EACH_ORDER
@EACH_CONFIG
@pytest.mark.parametrize("names", [TIED, TIED[::-1], TIED[:1], TIED[1:]])
def test_a_tied_head_loads_under_any_of_its_names(config, head_first, load, names):
    reference = Small(tie=True, head_first=head_first)
    model = fresh(config, tie=True, head_first=head_first)
    load(model, checkpoint(reference, names))
    wanted = olq.prepare(copy.deepcopy(reference), config)  # quantized at once
    assert as_bytes(model) == as_bytes(wanted)
    assert (model.head.weight is model.emb.weight) == bool(config.keep)
    reloaded = olq.prepare(Small(tie=True, head_first=head_first), config)
    load(reloaded, checkpoint(reference, names))
    assert as_bytes(reloaded) == as_bytes(wanted)


@EACH_LOAD
@EACH_ORDER
@EACH_CONFIG
@pytest.mark.parametrize("names", [TIED, TIED[::-1]])
def test_different_values_under_two_names_are_an_error(config, head_first, load, names):
    weights = checkpoint(Small(tie=True), names)
    weights[names[1]] = weights[names[1]].clone()
    weights[names[1]][7, 3] = -weights[names[1]][7, 3]
    with pytest.raises(CoverageError, match="under two names with different values") as caught:
        load(fresh(config, tie=True, head_first=head_first), weights)
    assert caught.value.where == f"{names[1]} (tied to {names[0]})"


def test_the_same_name_twice_is_not_taken_for_a_tie():
    model, weights = fresh(tie=True), state(Small(tie=True))
    with olq.session(model) as session:
        session.feed("emb.weight", weights["emb.weight"])
        with pytest.raises(CoverageError, match=r"'emb.weight', and then 'emb.weight'"):
            session.feed("emb.weight", weights["emb.weight"])
        session.abort()


@EACH_ORDER
def test_a_saved_model_gives_the_head_its_own_codes(head_first, monkeypatch):
    model = olq.prepare(Small(tie=True, head_first=head_first))
    saved = state(model)
    monkeypatch.setattr(olq.methods.Fp8, "quantize_", lambda *_: pytest.fail("quantized again"))
    for load in (*list(LOADS.values())[::2],):
        other = fresh(tie=True, head_first=head_first)
        load(other, saved)
        assert as_bytes(other) == as_bytes(model)


def test_saved_codes_of_a_tied_head_win_over_its_embedding_in_a_stream():
    """An iterator's names are not known beforehand: the embedding comes first and is quantized for the head."""
    model = olq.prepare(Small(tie=True))
    saved = state(model)
    for order in (saved, dict(reversed(saved.items()))):
        other = fresh(tie=True)
        olq.load(other, iter(order.items()))
        assert as_bytes(other) == as_bytes(model)


class Pair(nn.Module):
    """Two linear layers with one weight, or one layer under two names."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.b = self.a if shared else nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.b.weight = self.a.weight


def fresh_pair(shared: bool, config: olq.QuantConfig) -> nn.Module:
    with olq.meta_parameters():
        pair = Pair(shared)
    return olq.prepare(pair, config)


@EACH_LOAD
@pytest.mark.parametrize(("shared", "keep"), [(False, []), (False, ["a"]), (False, ["b"]), (True, [])])
@pytest.mark.parametrize("names", [("a.weight", "b.weight"), ("b.weight",), ("a.weight",)])
def test_two_layers_with_one_weight(load, shared, keep, names):
    config, reference = olq.QuantConfig(keep=keep), Pair(shared)
    model = fresh_pair(shared, config)
    load(model, {name: t for name, t in state(reference).items() if name in names})
    assert as_bytes(model) == as_bytes(olq.prepare(copy.deepcopy(reference), config))
    again = fresh_pair(shared, config)
    load(again, state(model))
    assert as_bytes(again) == as_bytes(model)


def test_a_shared_module_saved_with_different_codes_is_refused():
    model = olq.prepare(Pair(shared=True))
    saved = state(model)
    saved["b.weight"] = saved["b.weight"] ^ 1
    with pytest.raises(CoverageError, match="under two names with different values"):
        olq.load(fresh_pair(True, olq.QuantConfig()), saved)
