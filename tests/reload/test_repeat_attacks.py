"""What comes between, or goes wrong, in loads that repeat an earlier one.

On the CPU, where nothing waits for a GPU, weights are told to be judged later as on one.
"""

import gc
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import olq
from olq.errors import LoaderError, OlqError, StateError
from olq.reload import repeat, routine
from olq.reload.session import Session
from olq.reload.tree import Tree
from reload.engine_layers import OneWeight, weight
from reload.fused_model import Fused, cold, feed
from reload.fused_model import sources as cpu_sources
from reload.repeating import (
    ON_EACH_DEVICE,
    Where,
    activations,
    device,  # noqa: F401  (a fixture)
    fused,
    prepared,
    recorded,
    regular,
    repeating,
    sources,
    state_of_small,
)
from reload.small_models import Small, as_bytes, state

pytestmark = ON_EACH_DEVICE


def test_one_session_at_a_time_also_of_a_part():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fused()

        def load_weights(self, weights) -> None:
            self.inner.load_weights(weights)

    model = Outer()
    for seed in (1, 2):
        with Session(model, sources="stable") as session:
            session.load(iter(sources(seed).items()))
    session = repeating(model)
    assert session._repeated("q", sources(3)["q"])
    for other in (model, model.inner):
        with pytest.raises(StateError, match="A load of this model is open already"):
            Session(other).begin()
    session.load(iter({n: t for n, t in sources(3).items() if n != "q"}.items()))
    session.commit()
    assert as_bytes(model.inner) == cold(cpu_sources(3))


def test_a_move_between_two_feeds_is_followed():
    model, weights = recorded(), sources(3)
    session = repeating(model)
    session.feed("weight", weights["q"], "q")
    model.weight.data = model.weight.data.clone()  # as a move of the model does
    for name in ("k", "v"):
        session.feed("weight", weights[name], name)
    session.feed("norm", weights["norm"])
    session.flush()
    session.commit()
    assert as_bytes(model) == cold(cpu_sources(3))


def test_a_move_between_two_loads_is_followed():
    model = recorded()
    for seed in (3, 4, 5, 6):
        with Session(model, sources="stable") as session:
            feed(session, sources(seed))
        assert as_bytes(model) == cold(cpu_sources(seed))
        if seed % 2:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        else:
            model.quant_state.made.clear()  # as Module.to does
            for name in ("weight", "weight_scale"):
                setattr(model, name, nn.Parameter(getattr(model, name).detach().clone(), requires_grad=False))


def test_a_method_that_was_exchanged_writes_as_it_does():
    class Louder(type(olq.get_method("fp8"))):
        def write_(self, source, tensors, plan, target) -> None:
            written.append(target.part)
            super().write_(source, tensors, plan, target)

    written: list[int] = []
    model = recorded()
    for seed in (3, 4):
        with Session(model, sources="stable") as session:
            feed(session, sources(seed))
        model.quant_method = Louder()
    assert written == [0, 1, 2]
    assert as_bytes(model) == cold(cpu_sources(4))


class Odd(torch.Tensor):
    """A tensor without memory of its own, as a collective's result that is still to come."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map(lambda x: x.inner if isinstance(x, Odd) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_a_source_without_memory_of_its_own_is_read_by_its_operators():
    model, weights = recorded(), sources(3)
    for seed in (2, 3):
        session = repeating(model)
        feed(session, {n: Odd(t) if n == "q" else t for n, t in sources(seed).items()})
        session.commit()
    assert as_bytes(model) == cold(cpu_sources(3)), weights


def test_a_launch_that_failed_is_made_again(monkeypatch):
    model, weights = recorded(), sources(3)
    broken = [1]

    def launch(self, *args):
        if broken.pop() if broken else 0:
            raise torch.OutOfMemoryError("no room for a table")
        return whole(self, *args)

    whole = routine.Target.add
    monkeypatch.setattr(routine.Target, "add", launch)
    monkeypatch.setattr(repeat, "_FIRST", 2)
    monkeypatch.setattr(repeat, "_MOST", 2)
    session = repeating(model)
    session.feed("weight", weights["q"], "q")
    with pytest.raises(torch.OutOfMemoryError):
        session.feed("weight", weights["k"], "k")
    assert session.touched == ("weight",)
    for name in ("k", "v"):  # the one at which it failed is to be fed again, the other waits
        session.feed("weight", weights[name], name)
    session.feed("norm", weights["norm"])
    broken.append(1)
    with pytest.raises(torch.OutOfMemoryError):
        session.flush()
    report = session.commit()
    assert report.replayed == 4
    assert as_bytes(model) == cold(cpu_sources(3))


def test_a_load_that_failed_can_not_be_saved():
    model = recorded()
    session = repeating(model)
    session.feed("weight", sources(3)["q"], "q")
    session.abort()
    assert model.state_dict()["weight"].is_meta
    assert "weight_format" not in model.state_dict()


def test_calls_of_the_engines_own_loop_open_the_layers():
    for begin in (olq.initialize_layerwise_reload, lambda m: None):
        model, weights = recorded(), sources(3)
        parameter = model.quant_state.load_parameters["weight"]
        session = repeating(model)
        session.feed("weight", weights["q"], "q")
        begin(model)
        for name in ("k", "v"):
            parameter.weight_loader(parameter, weights[name], name)
        session.feed("norm", weights["norm"])
        report = olq.finalize_layerwise_processing(model)
        assert report.weights[0].arrivals == 3
        assert as_bytes(model) == cold(cpu_sources(3))


def test_a_session_is_gone_when_nobody_holds_it():
    """Without the garbage collector: what it holds is as large as a model."""
    model = recorded()
    gc.collect()
    gc.disable()
    try:
        for begin in (repeating, regular):
            session = begin(model)
            feed(session, sources(3))
            names = weakref.ref(session.names)
            session.commit()
            loads = [weakref.ref(load) for load in session.names.loads.values()]
            del session
            assert names() is None
            assert [load() for load in loads] == [None] * (begin is regular)
    finally:
        gc.enable()


def test_sources_that_wait_go_with_a_session_that_is_dropped():
    model, tensor = recorded(), sources(3)["q"]
    alive = weakref.ref(tensor)
    session = repeating(model)
    session.feed("weight", tensor, "q")
    del session, tensor
    gc.collect()
    assert alive() is None
    with pytest.raises(StateError, match=r"whose load failed|a load that is open"):
        model.quant_method.apply(model, activations())
    olq.load(model, iter(sources(4).items()))
    assert as_bytes(model) == cold(cpu_sources(4))


def test_a_kernel_tensor_that_was_replaced_is_named():
    model = recorded()
    session = repeating(model)
    feed(session, sources(3))
    model.weight_scale = nn.Parameter(model.weight_scale.detach().clone(), requires_grad=False)
    with pytest.raises(LoaderError, match=r"where: +weight_scale\n.*another object in its place"):
        session.commit()


@pytest.mark.parametrize(
    "options",
    [
        {"shadow": "device"},
        {"measure_error": True},
        {"measure_changes": True},
        {"scope": ["weight", "norm"]},
        {"replay": False},
        {"sources": "transient"},
    ],
    ids=str,
)
def test_sessions_that_ask_for_more_repeat_nothing(options):
    model = recorded()
    session = Session(model, **{"sources": "stable", **options}).begin()
    assert session.names.repeat is None
    feed(session, sources(3))
    session.commit()
    assert as_bytes(model) == cold(cpu_sources(3))


def _other_loader(model: Fused) -> None:
    vars(model.quant_state.load_parameters["weight"])["weight_loader"] = print


def _other_plan(model: Fused) -> None:
    geometry = model.quant_state.plans["weight"].geometry
    model.quant_state.plans["weight"] = olq.get_method("fp8", granularity="block").plan(
        geometry, torch.float16
    )


def _shared_module(model: Fused) -> None:
    model.one = model.other = nn.Identity()


@pytest.mark.parametrize("change", [_other_loader, _other_plan, _shared_module])
def test_a_model_that_changed_is_not_repeated(change):
    model = recorded()
    repeating(model).abort()
    change(model)
    if change is _other_plan:  # its kernel tensors would be others
        assert repeat.Repeat.begin(model.quant_plans.routine, Tree(model)) is None
        return
    session = Session(model, sources="stable").begin()
    assert session.names.repeat is None
    session.abort()


def test_tied_heads_and_staged_units_have_no_routine():
    tied = prepared(Small(tie=True))
    for _ in range(2):
        weights = state_of_small(tie=True)
        del weights["head.weight"]
        olq.reload(tied, weights, sources="stable")
    assert tied.quant_plans.routine is None
    with torch.device(Where.device):
        halves = OneWeight(
            lambda p, t, i: p[4 * i : 4 * i + 4].copy_(t),
            method="fp8",
            params={"granularity": "tensor"},
            parts=(8,),
        )
    values = weight(8, 32).to(Where.device)
    for _ in range(2):
        with Session(halves, sources="stable") as session:
            for i in range(2):
                session.feed("weight", values[4 * i : 4 * i + 4], i)
    assert halves.quant_plans.routine is None


def test_after_another_way_to_load_the_routine_is_gone_until_plans_cover_all_again():
    model = prepared(Small())
    weights = state_of_small()
    for _ in range(2):
        olq.reload(model, weights, sources="stable")
    assert model.quant_plans.routine is not None
    olq.load(model, model.state_dict())
    assert model.quant_plans.routine is None
    olq.reload(model, weights, sources="stable")
    session = repeating(model)
    session.load(state_of_small())
    session.commit()


def test_what_waits_is_bounded_and_freed():
    class Many(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            for i in range(count):
                self.add_module(f"layer{i}", nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))

    model = prepared(Many(200))
    for _ in range(2):
        olq.reload(model, state(Many(200).to(Where.device)), sources="stable")
    session, alive = repeating(model), []
    for name, tensor in state(Many(200).to(Where.device)).items():
        alive.append(weakref.ref(tensor))
        session.feed(name, tensor)
    del tensor
    gc.collect()
    assert 0 < sum(ref() is not None for ref in alive) < repeat._MOST
    session.flush()
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    session.commit()


STEPS = ["q", "k", "v", "norm", "flush", "status", "counter", "twice", "bad shape", "commit"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), max_size=12), seed=st.integers(3, 5))
def test_any_order_of_calls_does_what_a_regular_session_does(steps, seed):
    weights, outcomes, expected = sources(seed), [], cold(cpu_sources(seed))
    for begin in (repeating, regular):
        model, log = recorded(), []
        session = begin(model)
        for step in [*steps, "q", "k", "v", "norm", "commit"]:
            try:
                log.append(_do(session, step, weights))
            except OlqError as error:
                log.append((type(error).__name__, error.where, error.found))
        outcomes.append((log, as_bytes(model), model.quant_state.generation, session._state))
        assert as_bytes(model) == expected
    assert outcomes[0] == outcomes[1]


def _do(session: Session, step: str, weights: dict) -> object:
    if step in ("flush", "commit"):
        result = getattr(session, step)()
        return None if result is None else (result.replayed, len(result.weights), result.weights[0].arrivals)
    if step == "status":
        return session.status()
    if step == "counter":
        session.counter()
        return None
    name = {"twice": "q", "bad shape": "k"}.get(step, step)
    tensor = weights[name][:, :32] if step == "bad shape" else weights[name]
    return session.feed(*(("norm", tensor) if name == "norm" else ("weight", tensor, name)))
