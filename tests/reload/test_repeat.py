"""A load that repeats an earlier one: what it leaves out must not be seen, and whatever differs ends it.

On the CPU, where nothing waits for a GPU, weights are told to be judged later as on one.
"""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import olq
from olq.errors import CoverageError, LoaderError, NonFiniteError, OlqError, SourceError, StateError
from olq.reload import quantized, repeat
from olq.reload.session import Session
from olq.reload.tree import Tree
from reload.engine_layers import OneWeight, weight
from reload.fused_model import Fused, cold, feed
from reload.fused_model import sources as cpu_sources
from reload.plans import METHODS, method_id
from reload.small_models import Small, as_bytes, places, state

#: Those whose units a shard fills: a scale that several shards share is staged, and not repeated.
WHOLE = [method for method in METHODS if method[1].get("scale_sharing") != "common"]

pytestmark = [
    pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True, scope="function"
    ),
    # NumPy's, where Triton's interpreter runs the kernels: they divide by zero and don't take the result.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """Where models and sources are; the CPU judges later, as a GPU does."""
    if request.param == "cpu":
        monkeypatch.setattr(quantized, "waits", lambda device: True)
    monkeypatch.setattr(Where, "device", request.param)
    return request.param


class Where:
    """The device of the test that runs. What is random is drawn on the CPU, whatever it is."""

    device = "cpu"


def sources(seed: int) -> dict[str, torch.Tensor]:
    """What `Fused` loads, on the device."""
    return {name: tensor.to(Where.device) for name, tensor in cpu_sources(seed).items()}


def state_of_small(**options) -> dict[str, torch.Tensor]:
    """What `Small` loads, on the device."""
    return {name: tensor.to(Where.device) for name, tensor in state(Small(**options)).items()}


def prepared(model: nn.Module, config: olq.QuantConfig | None = None) -> nn.Module:
    """A prepared model on the device."""
    return olq.prepare(model.to(Where.device), config)


def fused(method: str = "fp8", **params: str) -> Fused:
    """A `Fused` without weights, on the device."""
    with torch.device(Where.device):
        return Fused(method, **params)


def activations() -> torch.Tensor:
    """A row for `Fused`."""
    return torch.ones(1, 64, device=Where.device)


def recorded(method: str = "fp8", **params: str) -> Fused:
    """A live `Fused` that has a routine for feeds and one for its own loop."""
    model = fused(method, **params)
    for seed in (1, 2):
        with Session(model, sources="stable") as session:
            feed(session, sources(seed))
    assert model.quant_plans.routine is not None
    return model


def repeating(model: nn.Module, **options) -> Session:
    """An open session that repeats."""
    session = Session(model, sources="stable", **options).begin()
    assert session.names.repeat is not None
    return session


def regular(model: nn.Module, **options) -> Session:
    """An open session that does not."""
    session = Session(model, sources="stable", **options).begin()
    session.names.open()
    return session


@pytest.mark.parametrize("method", WHOLE, ids=method_id)
def test_bytes_addresses_and_the_report_are_those_of_any_other_load(method):
    name, params = method
    models = [recorded(name, **params) for _ in range(2)]
    before = places(models[0])
    reports = []
    for model, begin in zip(models, (repeating, regular), strict=True):
        session = begin(model)
        feed(session, sources(3))
        assert (session.names.repeat is not None) == (begin is repeating)
        reports.append(session.commit())
    assert as_bytes(models[0]) == as_bytes(models[1]) == cold(cpu_sources(3), name, **params)
    assert places(models[0]) == before
    first, second = (report.as_dict() for report in reports)
    for facts in (first, second):
        facts["seconds"] = 0
    assert first == second
    assert first["replayed"] == 4
    assert models[0].quant_state.generation == models[1].quant_state.generation == 3


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_models_own_loop_and_a_mapping_are_repeated_too(method):
    name, params = method
    model = fused(name, **params)
    for seed in (1, 2, 3):
        olq.load(model, iter(sources(seed).items()), sources="stable")
    assert model.calls == ["q", "norm", "k", "v"]
    assert as_bytes(model) == cold(cpu_sources(3), name, **params)
    plain = prepared(Small(), olq.QuantConfig(method=name, params=params))
    for _ in range(3):
        weights = state_of_small()
        report = olq.reload(plain, weights, sources="stable")
    assert report.replayed == len(weights)
    fresh = prepared(Small(), olq.QuantConfig(method=name, params=params))
    olq.load(fresh, weights)
    assert as_bytes(plain) == as_bytes(fresh)


def test_layers_stay_closed_and_can_not_be_called():
    model = recorded()
    session = repeating(model)
    assert dict(model.named_parameters())["weight"].dtype == torch.uint8
    with pytest.raises(StateError, match="found:  a load that is open"):
        model.quant_method.apply(model, activations())
    with pytest.raises(StateError, match="can't be copied or pickled while its weights are arriving"):
        copy.deepcopy(model)
    feed(session, sources(3))
    session.commit()
    model.quant_method.apply(model, activations())
    copy.deepcopy(model)


def test_a_question_opens_the_layers_and_counts_what_came():
    weights = sources(3)
    for ask in (Session.status, Session.counter, lambda s: s.names.routes):
        model = recorded()
        session = repeating(model)
        session.feed("weight", weights["q"], "q")
        ask(session)
        assert session.names.repeat is None
        assert model.quant_state.open is not None
        row = session.status().tensors[0]
        assert (row.name, row.state, row.arrived) == ("weight", "partly", 48 * 64)
        for name in ("norm", "k", "v"):
            session.feed(*(("norm", weights["norm"]) if name == "norm" else ("weight", weights[name], name)))
        session.commit()
        assert as_bytes(model) == cold(cpu_sources(3))


def test_a_second_arrival_is_refused_and_names_both():
    model, weights = recorded(), sources(3)
    session = repeating(model)
    session.feed("weight", weights["k"], "k")
    with pytest.raises(CoverageError, match=r"weight\[48:64, 0:64\]\n.*'weight', and then"):
        session.feed("weight", weights["k"], "k")
    for name in ("q", "v"):
        session.feed("weight", weights[name], name)
    session.feed("norm", weights["norm"])
    session.commit()
    assert as_bytes(model) == cold(cpu_sources(3))


def test_what_is_missing_is_named_and_may_follow():
    model, weights = recorded(), sources(3)
    session = repeating(model)
    for name in ("q", "v"):
        session.feed("weight", weights[name], name)
    with pytest.raises(
        CoverageError, match=r"weight \(4096 of 5120 elements arrived; missing \[48:64, 0:64\]"
    ):
        session.commit()
    session.feed("weight", weights["k"], "k")
    session.feed("norm", weights["norm"])
    session.commit()
    assert as_bytes(model) == cold(cpu_sources(3))


def test_another_shape_runs_its_loader():
    model, weights = recorded(), sources(3)
    session = repeating(model)
    session.feed("weight", weights["q"], "q")
    model.calls.clear()
    with pytest.raises(SourceError, match="does not fit"):
        session.feed("weight", weights["k"][:, :32], "k")
    assert model.calls == ["k"]
    for name in ("k", "v"):
        session.feed("weight", weights[name], name)
    session.feed("norm", weights["norm"])
    session.commit()
    assert as_bytes(model) == cold(cpu_sources(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", WHOLE, ids=method_id)
def test_what_is_not_finite_is_refused_by_the_commit(method, value):
    name, params = method
    model, bad = recorded(name, **params), sources(3)
    bad["k"][3, 5] = value
    session = repeating(model)
    feed(session, bad)
    with pytest.raises(NonFiniteError, match=r"where: +weight\n.*1 weights with a scale that is NaN"):
        session.commit()
    session.abort()
    with pytest.raises(StateError, match="whose load failed"):
        model.quant_method.apply(model, activations())
    olq.load(model, iter(sources(4).items()))
    assert as_bytes(model) == cold(cpu_sources(4), name, **params)


def test_questions_after_the_end_leave_the_model_as_it_is():
    for end in (Session.commit, Session.abort):
        model, weights = recorded(), sources(3)
        session = repeating(model)
        feed(session, weights)
        end(session)
        assert session.status().missing == ()
        assert session.status().tensors[0].arrived == 80 * 64
        assert session.touched == ("weight", "norm")
        assert model.quant_state.open is None
        for call in (
            session.commit,
            session.abort,
            session.flush,
            lambda s=session: s.feed("x", activations()),
        ):
            with pytest.raises(StateError, match=f"a session that is {session._state}"):
                call()
        olq.load(model, iter(sources(4).items()), sources="stable")
        assert as_bytes(model) == cold(cpu_sources(4))


def test_an_abort_before_anything_came_leaves_a_live_model():
    model = recorded()
    before = as_bytes(model)
    repeating(model).abort()
    assert as_bytes(model) == before
    model.quant_method.apply(model, activations())
    repeating(model)  # begun, and dropped: the next one takes its place
    session = repeating(model)
    feed(session, sources(3))
    session.commit()
    assert as_bytes(model) == cold(cpu_sources(3))


def test_an_abort_after_something_came_leaves_one_that_says_so():
    model = recorded()
    session = repeating(model)
    session.feed("weight", sources(3)["q"], "q")
    assert session.touched == ("weight",)
    session.abort()
    with pytest.raises(StateError, match="had written 1 parameters: weight"):
        model.quant_method.apply(model, activations())
    olq.load(model, iter(sources(4).items()), sources="stable")
    assert as_bytes(model) == cold(cpu_sources(4))


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


def test_a_move_between_two_feeds_is_followed(device):
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
    import gc
    import weakref

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
def test_any_order_of_calls_does_what_a_regular_session_does(device, steps, seed):
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
