"""A load that repeats an earlier one: what it leaves out must not be seen, and whatever differs ends it.

On the CPU, where nothing waits for a GPU, weights are told to be judged later as on one.
"""

import copy

import pytest
import torch

import olq
from olq.errors import CoverageError, NonFiniteError, SourceError, StateError
from olq.reload.session import Session
from reload.fused_model import cold, feed
from reload.fused_model import sources as cpu_sources
from reload.plans import METHODS, method_id
from reload.repeating import (
    ON_EACH_DEVICE,
    WHOLE,
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
from reload.small_models import Small, as_bytes, places

pytestmark = ON_EACH_DEVICE


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
    twin = copy.deepcopy(model)  # nothing has come yet
    twin.quant_method.apply(twin, activations())
    assert not twin.quant_state.made
    weights = sources(3)
    session.feed("weight", weights.pop("q"), "q")
    with pytest.raises(StateError, match="can't be copied or pickled while its weights are arriving"):
        copy.deepcopy(model)
    feed(session, weights)
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


def test_a_routine_is_kept_while_its_plans_bring_everything_whatever_else_comes():
    """Norms and other parameters in high precision come by plans too, and are not part of it."""
    model = recorded()
    routine = model.quant_plans.routine
    for seed in (3, 4):
        with Session(model) as session:  # transient sources: a regular session
            feed(session, sources(seed))
        assert model.quant_plans.routine is routine
    assert as_bytes(model) == cold(cpu_sources(4))
