"""Failures of accounting, by kind: who counts as arrived, and where state between calls is kept (docs/failures.md)."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, LoaderError, StateError, UnknownNameError
from olq.methods.state import find_state
from reload.engine_layers import OneWeight, call, stored_bytes, weight, whole_bytes
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state


def vector(values: Tensor, loader=None) -> nn.Parameter:
    """A parameter that an engine keeps in high precision, with a loader of its own if given."""
    parameter = nn.Parameter(values, requires_grad=False)
    if loader is not None:
        parameter.weight_loader = loader
    return parameter


def nothing(*shape: int) -> Tensor:
    """Memory that nobody has written."""
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("dropped", ["a.weight_scale", "b.weight_scale"])
def test_a_reload_of_codes_without_their_scales_is_refused_by_name_and_not_served(dropped):
    model, saved = live(), live().state_dict()
    with pytest.raises(CoverageError, match=dropped.replace(".", r"\.")):
        olq.reload(model, {name: t for name, t in saved.items() if name != dropped})
    with pytest.raises(StateError, match="before its weights were complete"):
        model(TOKENS)
    olq.reload(model, saved)
    assert model(TOKENS).isfinite().all()


def test_a_weight_that_comes_first_waits_for_all_that_belongs_to_its_layer():
    layer = OneWeight(None, bias="after")
    layer.input_scale = vector(nothing())
    bias = layer.bias
    olq.initialize_online_processing(layer)
    call(layer, weight(16, 32))
    for name, source in (("bias", weight(16)), ("input_scale", torch.tensor(0.25))):
        with pytest.raises(CoverageError, match=rf"{name} \(nothing arrived\)"):
            olq.finalize_layerwise_processing(layer)
        with pytest.raises(StateError, match="before its weights were complete"):
            layer.quant_method.apply(layer, weight(2, 32), layer.bias)
        call(layer, source, name=name)
    olq.finalize_layerwise_processing(layer)
    assert layer.bias is bias
    assert torch.equal(layer.bias, weight(16))
    assert layer.input_scale.item() == 0.25
    assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32))


@pytest.mark.parametrize("spread", [True, False])
def test_one_scale_of_a_file_fills_all_slots_of_a_fused_layer_or_the_others_are_missed(spread):
    def loader(p: Tensor, x: Tensor) -> None:
        (p if spread else p[:1]).copy_(x)

    layer = OneWeight(None, parts=(16, 8, 8))
    layer.scales = vector(nothing(3), loader)
    olq.initialize_online_processing(layer)
    call(layer, weight(32, 32))
    call(layer, torch.tensor(0.5), name="scales")
    if spread:
        olq.finalize_layerwise_processing(layer)
        assert layer.scales.tolist() == [0.5, 0.5, 0.5]
        return
    with pytest.raises(CoverageError, match=r"scales \(1 of 3 elements arrived; missing \[1:3\]\)"):
        olq.finalize_layerwise_processing(layer)
    layer.scales[1:] = 1.0  # outside of a loader: nobody has seen it
    with pytest.raises(CoverageError, match=r"1 of 3 elements"):
        olq.finalize_layerwise_processing(layer)


class Experts(OneWeight):
    """Some experts of many: a loader is offered all of them."""

    def __init__(self, local: dict[int, int]) -> None:
        super().__init__(self.load_expert, lead=(len(local),))
        self.local, self.scratch = local, []

    def load_expert(self, parameter: Tensor, source: Tensor, expert: int) -> None:
        if expert in self.local:
            parameter[self.local[expert]].copy_(source)


def test_what_belongs_to_another_rank_costs_nothing_and_counts_nothing(monkeypatch):
    layer = Experts({5: 0, 41: 1})
    quantize, rows = layer.quant_method.quantize_, []
    monkeypatch.setattr(
        layer.quant_method, "quantize_", lambda s, *rest: rows.append(s.numel()) or quantize(s, *rest)
    )
    sources = [weight(16, 32, seed=i) for i in range(64)]
    olq.initialize_online_processing(layer)
    for expert, source in enumerate(sources[:41]):
        call(layer, source, expert)
    assert find_state(layer).open.meter.peak == 0
    with pytest.raises(CoverageError, match=r"512 of 1024 elements arrived"):
        olq.finalize_layerwise_processing(layer)
    for expert, source in enumerate(sources[41:], 41):
        call(layer, source, expert)
    olq.finalize_layerwise_processing(layer)
    assert sum(rows) == 2 * 16 * 32
    assert stored_bytes(layer) == whole_bytes(layer, torch.stack([sources[5], sources[41]]))


class Attention(nn.Module):
    """Fused q and k, and a scale of the attention that is no part of them; its loading loop renames.

    Args:
        careless: rewrite every name that contains a part's, scales of the attention included.
    """

    def __init__(self, careless: bool = False) -> None:
        super().__init__()
        self.careless = careless
        self.qk_proj = OneWeight(self.load_part, parts=(16, 8))
        self.k_scale = vector(nothing())

    @staticmethod
    def load_part(parameter: Tensor, source: Tensor, part: str) -> None:
        start, rows = {"q": (0, 16), "k": (16, 8)}[part]
        parameter[start : start + rows].copy_(source)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            part = name[0]
            if self.careless or name.endswith(".weight"):
                name = name.replace(f"{part}_proj", "qk_proj")
            elif name == "k_proj.k_scale":
                name = "k_scale"
            if name not in parameters:
                continue  # as loops do that mean to skip what other ranks hold
            loader = getattr(parameters[name], "weight_loader", None)
            loader(parameters[name], tensor, part) if loader else parameters[name].data.copy_(tensor)


CHECKPOINT = {
    "q_proj.weight": weight(16, 32),
    "k_proj.weight": weight(8, 32, seed=1),
    "k_proj.k_scale": torch.tensor(0.125),
}


def test_a_scale_that_a_renaming_loop_loses_is_named_with_what_wrote_nothing():
    model = nn.Sequential(Attention(careless=True))
    model.load_weights = model[0].load_weights
    with pytest.raises(CoverageError) as error:
        olq.load(model, iter(CHECKPOINT.items()))
    assert error.value.where == "0.k_scale (nothing arrived)"
    assert "wrote nothing: k_proj.k_scale" in error.value.found
    right = Attention()
    report = olq.load(right, iter(CHECKPOINT.items()))
    assert right.k_scale.item() == 0.125
    assert not report.surplus


def test_pieces_of_one_weight_may_come_in_several_calls_of_one_session():
    """The part that waits for its partner is kept by the session, not by a call."""
    names = list(CHECKPOINT)
    once, often = Attention(), Attention()
    for model in (once, often):
        method = olq.get_method("fp8", granularity="tensor", scale_sharing="common")
        model.qk_proj = nn.Module()
        method.create_weights(
            model.qk_proj, 32, (16, 8), dtype=torch.bfloat16, weight_loader=Attention.load_part
        )
    olq.load(once, CHECKPOINT.items())
    with olq.session(often) as session:
        for name in names[::-1]:
            with pytest.raises(CoverageError, match=r"qk_proj\.weight"):
                session.commit()
            session.load([(name, CHECKPOINT[name])])
    assert as_bytes(often) == as_bytes(once)


def test_a_name_that_was_mapped_twice_is_unknown_and_the_right_one_is_suggested():
    model = nn.ModuleDict({"model": nn.ModuleDict({"attn": OneWeight(None)})})
    with pytest.raises(UnknownNameError, match=r"did you mean 'model\.attn\.weight'"):
        olq.load(model, {"model.attn.attn.weight": weight(16, 32)})
    olq.load(model, {"model.attn.weight": weight(16, 32)})


def two_roots() -> nn.ModuleDict:
    """A target and a draft that share embedding and head, each with a layer of its own."""
    target, draft = Small(), Small()
    draft.emb, draft.head = target.emb, target.head
    del draft.b
    draft.b = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
    return olq.prepare(nn.ModuleDict({"target": target, "draft": draft}))


def test_a_session_over_two_roots_loads_what_they_share_once_and_misses_what_is_the_drafts_own():
    model = two_roots()
    weights = {
        f"{root}.{name}": t * (1 + (root == "draft") * (name in ("a.weight", "b.weight")))
        for root in ("target", "draft")
        for name, t in state(Small()).items()
        if root == "target" or name not in ("emb.weight", "head.weight")
    }
    with pytest.raises(CoverageError, match=r"draft\.b\.weight"):
        olq.reload(model, {name: t for name, t in weights.items() if name != "draft.b.weight"})
    report = olq.reload(model, weights)
    assert model["draft"].head is model["target"].head
    assert [w.arrivals for w in report.weights if w.name == "target.head.weight"] == [1]
    for root in ("target", "draft"):
        wanted = fresh()
        mine = {name: weights.get(f"{root}.{name}", weights[f"target.{name}"]) for name in state(Small())}
        olq.load(wanted, mine)
        assert as_bytes(model[root]) == as_bytes(wanted)


def test_a_session_over_one_root_leaves_what_is_the_others_own_bit_for_bit():
    model = two_roots()
    own = {n: b for n, b in as_bytes(model["draft"]).items() if n[0] in "ab"}
    at = places(model["draft"])
    olq.reload(model["target"], {name: -2 * t for name, t in state(Small()).items()})
    assert {n: b for n, b in as_bytes(model["draft"]).items() if n in own} == own
    assert places(model["draft"]) == at
    model["draft"](TOKENS)


def test_a_reload_that_finds_the_parameters_replaced_says_so():
    model, weights = live(), state(Small())

    def replace() -> None:
        with olq.session(model) as session:
            for name, parameter in list(model.a.named_parameters()):
                setattr(model.a, name, nn.Parameter(torch.empty_like(parameter, device="cpu"), False))
            for name, tensor in weights.items():
                session.feed(name, tensor)

    with pytest.raises(LoaderError, match=r"a\.weight"):
        replace()
