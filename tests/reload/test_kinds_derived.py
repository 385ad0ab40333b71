"""Failures of what hangs on weights, by kind, through the loads that users make (docs/failures.md)."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import olq
from olq.errors import NonFiniteError
from olq.methods.state import find_state
from olq.reload.derived import refresh
from reload.engine_layers import OneWeight, bytes_of, weight
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state


def quarter(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    """A checkpoint of one of the engines below: other values, other order, other scale by seed and size."""
    g = torch.Generator().manual_seed(seed)
    return {"layer.weight": weight(16, 32, seed=seed) * size, "g": torch.randn(8, generator=g) * size}


class Engine(nn.Module):
    """A quantized weight, and a vector in high precision on which everything else hangs."""

    def __init__(self, method: str = "nvfp4") -> None:
        super().__init__()
        self.layer = OneWeight(None, method=method)
        self.g = nn.Parameter(torch.full((8,), float("nan")), requires_grad=False)


class Mirrored(Engine):
    """A float32 copy, a shifted copy, and a scale as a Python number: the step of a module without a method."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shifted", torch.zeros(8), persistent=False)
        self.calls = 0
        olq.derive(self, "shifted", lambda m: m.g + 1)
        olq.after_load(self, Mirrored.post_load)

    def post_load(self) -> None:
        self.calls += 1
        self.mirror = self.g.double()
        self.alpha = self.layer.weight_scale_2[0] * 0.25
        self.alpha_number = float(self.alpha)


def test_the_step_of_a_plain_module_runs_once_with_each_load_and_its_tensors_stay_in_place():
    model = Mirrored()
    olq.load(model, quarter(1))
    held = model.mirror, model.shifted, model.alpha
    at = [t.data_ptr() for t in held]
    for load in (olq.reload, olq.load):
        b = quarter(2, 37.0)
        report = load(model, b)
        assert {"shifted", "post_load()"} == set(report.derived)
        assert [t.data_ptr() for t in (model.mirror, model.shifted, model.alpha)] == at
        assert torch.equal(held[0], b["g"].double())
        assert torch.equal(held[1], b["g"] + 1)
        assert held[2].item() == model.layer.weight_scale_2[0].item() * 0.25 == model.alpha_number
        assert not report.undeclared
    assert model.calls == 3


def test_a_weight_written_past_every_loader_leaves_derived_tensors_old_until_they_are_refreshed():
    model = Mirrored()
    olq.load(model, quarter(1))
    at, old = model.shifted.data_ptr(), model.shifted.clone()
    new = torch.arange(8.0)
    model.g.data.copy_(new)
    assert torch.equal(model.shifted, old)
    assert set(refresh(model).refreshed) == {"shifted", "post_load()"}
    assert torch.equal(model.shifted, new + 1)
    assert torch.equal(model.mirror, new.double())
    assert model.shifted.data_ptr() == at


class Permuted(Engine):
    """A helper with a permutation, constants and a workspace, made anew by each post-load step."""

    def __init__(self) -> None:
        super().__init__()
        olq.after_load(self, Permuted.post_load)

    def post_load(self) -> None:
        self.run = functools.partial(torch.index_select, dim=0, index=torch.argsort(self.g))
        self.helpers = [{"constant": torch.full((3,), 0.5)}, torch.zeros(4)]


def test_who_holds_an_old_helper_sees_the_permutation_of_the_new_weights():
    model, b = Permuted(), quarter(2)
    olq.load(model, quarter(1))
    run, constant, workspace = model.run, model.helpers[0]["constant"], model.helpers[1]
    assert not torch.equal(torch.argsort(b["g"]), run.keywords["index"])
    for _ in range(2):
        report = olq.reload(model, b)
        assert torch.equal(run(torch.arange(8)), torch.argsort(b["g"]))
        assert model.helpers[0]["constant"].data_ptr() == constant.data_ptr()
        assert model.helpers[1].data_ptr() == workspace.data_ptr()
        assert report.undeclared == {}


class Lazy(Engine):
    """Makes a padded copy at its first forward.

    Args:
        declared: as a derived tensor, as a hook that drops it, or not at all.
    """

    def __init__(self, declared: str) -> None:
        super().__init__()
        self.padded = None
        if declared == "derive":
            olq.derive(self, "padded", lambda m: functional.pad(m.g, (0, 2)))
        elif declared == "drop":
            olq.after_load(self, lambda m: setattr(m, "padded", None))

    def forward(self) -> Tensor:
        if self.padded is None:
            self.padded = functional.pad(self.g.detach(), (0, 2))
        return self.padded


@pytest.mark.parametrize("declared", ["derive", "drop", ""])
def test_a_copy_made_at_the_first_forward_follows_the_weights_or_stands_in_the_report(declared):
    model = Lazy(declared)
    olq.load(model, quarter(1))
    at = model().data_ptr()
    report = olq.reload(model, quarter(2))
    followed = torch.equal(model()[:8], quarter(2)["g"])
    assert followed == bool(declared)
    assert ("padded" in report.undeclared) == (not declared)
    if declared == "derive":
        assert model().data_ptr() == at


def test_memory_that_was_dropped_between_loads_comes_back_or_is_listed():
    model, cold = Mirrored(), Mirrored()
    olq.load(model, quarter(1))
    model.cache = torch.ones(3)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.mirror, model.shifted, model.alpha, model.cache):
            tensor.detach().view(torch.uint8).zero_() if tensor.dim() else tensor.zero_()
    report = olq.reload(model, quarter(2))
    olq.load(cold, quarter(2))
    assert {n: b for n, b in as_bytes(model).items() if n != ".cache"} == as_bytes(cold)
    assert set(report.undeclared) == {"cache"}


# Sessions


def test_a_declared_subset_leaves_all_other_layers_bit_for_bit_and_lists_them():
    model, weights = live(), {name: -37 * t for name, t in state(Small()).items()}
    before, at = as_bytes(model), places(model)
    report = olq.reload(model, {n: t for n, t in weights.items() if n.startswith("a.")}, scope=["a"])
    whole = fresh()
    olq.load(whole, weights)
    after, wanted = as_bytes(model), as_bytes(whole)
    assert {n: b for n, b in after.items() if n.startswith("a.")} == {
        n: b for n, b in wanted.items() if n.startswith("a.")
    }
    assert {n: b for n, b in after.items() if not n.startswith("a.")} == {
        n: b for n, b in before.items() if not n.startswith("a.")
    }
    assert places(model) == at
    assert set(report.stale) == {"emb.weight", "b.weight", "head.weight"}
    assert {w.name for w in report.weights} == {"a.weight"}
    model(TOKENS)


def refuse_large(module: nn.Module) -> None:
    """A hook that some weights are too much for."""
    if module.g[0] > 100:
        raise OSError("no workspace for such weights")


@pytest.mark.parametrize("failure", ["weight", "hook"])
@pytest.mark.parametrize("shadow", ["device", "host"])
def test_a_shadow_load_that_fails_leaves_everything_as_it_was(shadow, failure):
    model = Mirrored()
    olq.after_load(model, refuse_large, reads=[(model, Mirrored.post_load)])
    olq.load(model, quarter(1))
    before, at = as_bytes(model), places(model)
    bad = quarter(2)
    if failure == "weight":
        bad["layer.weight"][3, 5] = float("inf")
    else:
        bad["g"][0] = 101
    with pytest.raises((NonFiniteError, OSError)):
        olq.reload(model, bad, shadow=shadow)
    assert (as_bytes(model), places(model)) == (before, at)
    assert model.quant_generation == 1
    assert find_state(model.layer).generation == 1
    model.layer.quant_method.apply(model.layer, weight(2, 32))
    olq.reload(model, quarter(2), shadow=shadow)
    cold = Mirrored()
    olq.load(cold, quarter(2))
    assert as_bytes(model) == as_bytes(cold)


def test_a_bucket_of_stable_sources_may_be_overwritten_after_the_flush_and_not_before():
    model, weights = live(), state(Small())
    olq.reload(model, weights)  # records what loaders do
    bucket = {name: t.clone() for name, t in weights.items()}
    with olq.session(model, sources="stable") as session:
        for name, tensor in bucket.items():
            session.feed(name, tensor)
        session.flush()
        for tensor in bucket.values():
            tensor.fill_(7)
    wanted = fresh()
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)


def test_a_plan_of_an_earlier_load_is_not_used_when_what_its_loader_looked_at_has_moved():
    """Experts change their slots between loads: the loader's map is no part of the tensor that is fed."""
    slots = {0: [0, 3], 1: [1], 2: [2]}

    def loader(parameter: Tensor, source: Tensor, expert: int) -> None:
        for slot in slots[expert]:
            parameter[slot].copy_(source)

    model = nn.Sequential(OneWeight(loader, lead=(4,)))

    def where_experts_are(_: str) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, slots.values()))

    def feed_all(seed: int) -> None:
        with olq.session(model, plan_key=where_experts_are) as session:
            for expert in slots:
                session.feed("0.weight", weight(16, 32, seed=seed + expert), expert)

    feed_all(0)
    slots.update({0: [1, 2], 1: [3], 2: [0]})
    feed_all(10)
    stack = torch.stack([weight(16, 32, seed=10 + e) for e in (2, 0, 0, 1)])
    wanted = OneWeight(None, lead=(4,))
    olq.load(wanted, {"weight": stack})
    assert bytes_of(model[0].weight) == bytes_of(wanted.weight)


def test_those_who_cache_by_generation_are_told_of_each_commit_and_of_nothing_else():
    model, weights, told = fresh(), state(Small()), []
    olq.on_commit(model, lambda m, report: told.append((m, report.generation)))
    olq.load(model, weights)
    session = olq.session(model).begin()
    session.feed("a.weight", weights["a.weight"])
    session.abort()
    olq.reload(model, weights)
    assert told == [(model, 1), (model, 2)]
    assert model.quant_generation == 2
