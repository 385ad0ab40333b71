"""Failures of identity, by kind: objects, addresses, loaders and numbers that outlive a load (docs/failures.md)."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import NonFiniteError, SourceError, StateError
from olq.methods.state import find_state
from reload.engine_layers import OneWeight, bytes_of, call, weight
from reload.plans import METHODS, method_id
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state, tensors

EACH_METHOD = pytest.mark.parametrize("method", METHODS, ids=method_id)


def config(method: tuple[str, dict[str, str]]) -> olq.QuantConfig:
    return olq.QuantConfig(method=method[0], params=method[1])


class Router(nn.Module):
    """A constant that no checkpoint has to hold, beside a quantized weight; its loop takes whatever it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OneWeight(None)
        self.register_buffer("root_size", torch.tensor(0.0188), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        known = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            loader = getattr(known[name], "weight_loader", None)
            loader(known[name], tensor) if loader else known[name].copy_(tensor)


def test_a_runtime_constant_keeps_its_value_and_place_unless_it_arrives():
    model = Router()
    at = model.root_size.data_ptr()
    for _ in range(3):
        olq.load(model, iter({"layer.weight": weight(16, 32)}.items()))
        assert model.root_size.item() == torch.tensor(0.0188).item()
        assert model.root_size.data_ptr() == at
    olq.load(model, iter({"layer.weight": weight(16, 32), "root_size": torch.tensor(0.5)}.items()))
    assert (model.root_size.item(), model.root_size.data_ptr()) == (0.5, at)


@EACH_METHOD
def test_names_during_each_load_are_those_of_construction_and_afterwards_those_of_the_first_commit(method):
    model = fresh(config(method))
    constructed = [(name, p.shape, p.dtype) for name, p in model.named_parameters()]
    committed: list[set[str]] = []
    for i in range(3):
        with olq.session(model) as session:
            assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == constructed
            session.load({name: t * (i + 1) for name, t in state(Small()).items()})
        committed.append(set(tensors(model)))
    assert committed[0] == committed[1] == committed[2]


@EACH_METHOD
def test_who_reads_through_an_old_alias_computes_what_the_module_computes(method):
    """A captured graph holds addresses: of codes, of scales, and of everything in high precision."""
    model, b = live(config(method)), {name: -37 * t for name, t in state(Small()).items()}
    aliases = {name: t.detach() for name, t in tensors(model).items()}
    olq.reload(model, b)
    cold = fresh(config(method))
    olq.load(cold, b)
    assert {name: bytes_of(alias) for name, alias in aliases.items()} == as_bytes(cold)
    for name, alias in aliases.items():  # the other way round: what is written there is what the module reads
        if not name.endswith("_format"):
            alias.view(torch.uint8).zero_()
    assert not model(TOKENS).nan_to_num(nan=0.0).any()


def test_the_tensor_scale_of_other_weights_stands_in_its_old_place():
    model = nn.Sequential(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
    olq.prepare(model, olq.QuantConfig(method="nvfp4"))
    alias, at = model[0].weight_scale_2.detach(), places(model)
    for amax in (1.0, 37.0):
        source = weight(16, 32).clamp(-0.9, 0.9)
        source[3, 5] = amax
        olq.reload(model, {"0.weight": source})
        assert alias.tolist() == [torch.tensor(amax / 2688).item()]
    assert places(model) == at


def test_a_loader_kept_from_a_load_refuses_to_write_into_kernel_tensors_afterwards():
    model = nn.Sequential(OneWeight(lambda p, x: p.data.copy_(x), bias="after"))
    kept = {name: (p, p.weight_loader) for name, p in model[0].named_parameters() if name == "weight"}
    olq.initialize_online_processing(model)
    kept |= {f"open {n}": (p, p.weight_loader) for n, p in model[0].named_parameters()}
    call(model[0], weight(16, 32))
    call(model[0], weight(16), name="bias")
    olq.finalize_layerwise_processing(model)
    before = as_bytes(model)
    assert not hasattr(model[0].weight, "weight_loader")  # of the codes
    for name, (parameter, loader) in kept.items():
        for target in (parameter, model[0].weight):
            if name.startswith("open"):
                with pytest.raises(StateError, match="called while no load is open"):
                    loader(target, weight(16, 32))
    assert as_bytes(model) == before
    model[0].quant_method.apply(model[0], weight(2, 32))


@pytest.mark.parametrize("failure", ["non-finite", "abort", "abort untouched", "shape"])
def test_generations_count_commits_only(failure):
    """They are what a cache of something derived can compare: addresses do not tell."""
    model, weights = fresh(), state(Small())
    olq.load(model, weights)
    at = places(model)

    def generations() -> set[int]:
        return {model.quant_generation} | {find_state(m).generation for m in (model.a, model.b, model.head)}

    assert generations() == {1}
    if failure.startswith("abort"):
        session = olq.session(model).begin()
        if failure == "abort":
            session.feed("a.weight", weights["a.weight"])
        session.abort()
    else:
        spoiled = {**weights, "b.weight": weights["b.weight"] * float("inf")}
        if failure == "shape":
            spoiled["b.weight"] = weights["b.weight"][:5]
        with pytest.raises((NonFiniteError, SourceError)):
            olq.reload(model, spoiled)
    assert generations() == {1}
    olq.reload(model, {name: 2 * t for name, t in weights.items()})
    assert generations() == {2}
    assert places(model) == at


class Halving(OneWeight):
    """Loaders that change what they are given: half of the weight, and -exp of a vector."""

    def __init__(self, method: tuple[str, dict[str, str]]) -> None:
        super().__init__(self.halve, method=method[0], params=method[1])
        self.A = nn.Parameter(torch.full((8,), float("nan")), requires_grad=False)
        self.A.weight_loader = self.exponential

    @staticmethod
    def halve(parameter: Tensor, source: Tensor) -> None:
        parameter.copy_(source)
        parameter.mul_(0.5)

    @staticmethod
    def exponential(parameter: Tensor, source: Tensor) -> None:
        parameter.copy_(source)
        parameter.copy_(-torch.exp(parameter))


@EACH_METHOD
def test_ten_reloads_of_one_checkpoint_drift_by_nothing(method):
    model, weights = Halving(method), {"weight": weight(16, 32), "A": torch.linspace(-2, 2, 8)}
    olq.load(model, weights)
    before, at = as_bytes(model), places(model)
    for _ in range(10):
        olq.reload(model, weights)
        assert as_bytes(model) == before
    for _ in range(3):
        olq.reload(
            model,
            {name: t.clone() for name, t in model.state_dict().items() if name != "A"} | {"A": weights["A"]},
        )
        assert as_bytes(model) == before
    assert places(model) == at


def test_a_model_with_nothing_quantized_gets_its_own_weights_back_bit_for_bit():
    model = Halving(("keep", {}))
    model.weight.data = torch.empty(16, 32, dtype=torch.bfloat16)
    model = nn.Sequential(model)
    weights = {"0.weight": weight(16, 32), "0.A": torch.linspace(-2, 2, 8)}
    olq.load(model, weights)
    before, at = as_bytes(model), places(model)
    report = olq.load(model, weights)
    assert not report.weights
    assert report.staged_peak_bytes == 0
    assert as_bytes(model) == before
    assert places(model) == at
    assert torch.equal(model[0].A, -torch.exp(weights["0.A"]))
