"""The second load of a name repeats what its loader did, without the loader, and only where that is right."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import olq
from olq.errors import CoverageError, NonFiniteError, SourceError, StateError
from olq.reload import quantized
from reload.engine_layers import OneWeight, bytes_of, stored_bytes, weight, whole_bytes
from reload.fused_model import Fused, sources
from reload.plans import METHODS, method_id, partitions
from reload.small_models import Small, as_bytes, fresh, live, places, state


@pytest.mark.parametrize("through", ["load_weights", "feed"])
@pytest.mark.parametrize("stable", ["transient", "stable"])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_replayed_load_equals_a_cold_one_and_runs_no_loader(method, stable, through):
    name, params = method
    model, cold = Fused(name, **params), Fused(name, **params)
    olq.load(cold, sources(2).items(), replay=False)

    def run(weights):
        with olq.session(model, sources=stable) as session:
            if through == "load_weights":
                session.load(iter(weights.items()))
            else:
                for key, tensor in weights.items():
                    session.feed(
                        "norm" if key == "norm" else "weight", tensor, *(() if key == "norm" else (key,))
                    )
            return session.commit()

    assert run(sources(1)).replayed == 0
    at, model.calls = places(model), []
    report = run(sources(2))
    assert (report.replayed, model.calls) == (4, [])
    assert as_bytes(model) == as_bytes(cold)
    assert places(model) == at
    assert [w.arrivals for w in report.weights] == [3]


@settings(max_examples=30)
@given(data=st.data())
def test_any_cut_and_order_replays_to_the_same_bytes(data):
    """Each name is a box of the weight, of any steps; the second session feeds them in another order."""
    name, params = data.draw(st.sampled_from(METHODS))
    boxes = data.draw(partitions((40, 70)))
    order = data.draw(st.permutations(range(len(boxes))))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float32)))
    stable = data.draw(st.sampled_from(("transient", "stable")))

    def loader(parameter, tensor, i):
        parameter[tuple(slice(r.start, r.stop, r.step) for r in boxes[i])].copy_(tensor)

    layer = OneWeight(loader, method=name, params=params, parts=(40,), columns=70)
    for seed, sequence in ((1, range(len(boxes))), (2, order)):
        values = weight(40, 70, seed=seed).to(dtype)
        with olq.session(layer, sources=stable) as session:
            for i in sequence:
                part = values[tuple(slice(r.start, r.stop, r.step) for r in boxes[i])].contiguous()
                session.feed("weight", part, i)
            report = session.commit()
    assert report.replayed == sum(all(map(len, box)) for box in boxes)
    assert stored_bytes(layer) == whole_bytes(layer, weight(40, 70, seed=2))


LOADERS = {
    "cast": lambda p, t: p.copy_(t.float()),
    "computed": lambda p, t: p.copy_(t + 1),
    "transformed in place": lambda p, t: (p.copy_(t), p.mul_(2)),
    "looked at": lambda p, t: p.copy_(t if t[0, 0] > 0 else -t),
    "indexed": lambda p, t: p.copy_(t[torch.arange(16).flip(0)]),
    "constant": lambda p, t: (p.copy_(t), p[:4].zero_()),
    "assigned": lambda p, t: setattr(p, "data", t),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_does_more_than_copy_runs_every_time(kind):
    layer = OneWeight(lambda p, t: LOADERS[kind](p, t))
    results = []
    for seed in (1, 2, 3):
        with olq.session(layer) as session:
            session.feed("weight", weight(16, 32, seed=seed))
            replayed = session.commit().replayed
        cold = OneWeight(lambda p, t: LOADERS[kind](p, t))
        with olq.session(cold, replay=False) as session:
            session.feed("weight", weight(16, 32, seed=seed))
        results.append((replayed, stored_bytes(layer) == stored_bytes(cold)))
    assert results[1:] == [(kind == "assigned", True)] * 2


VIEWS = {
    "transposed": lambda p, t: p.copy_(t.t()),
    "halves swapped": lambda p, t: (p[:8].copy_(t[8:]), p[8:].copy_(t[:8])),
    "broadcast": lambda p, t: p.copy_(t[:1].expand(16, 32)),
    "every other row": lambda p, t: (p[::2].copy_(t[:8]), p[1::2].copy_(t[8:])),
    "overlap, the last wins": lambda p, t: (p.copy_(t), p[:4].copy_(t[4:8])),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_the_source_are_replayed_as_views(kind):
    shape = (32, 16) if kind == "transposed" else (16, 32)
    layers = [OneWeight(lambda p, t: VIEWS[kind](p, t)) for _ in range(2)]
    for layer in layers:
        for seed in (1, 2):
            with olq.session(layer, replay=layer is layers[0]) as session:
                session.feed("weight", weight(*shape, seed=seed))
                replayed = session.commit().replayed
        assert replayed == (layer is layers[0] and "overlap" not in kind)
    assert stored_bytes(layers[0]) == stored_bytes(layers[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.float(),
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t])[::2][:16],
    ],
    ids=["dtype", "strides", "step"],
)
def test_another_signature_runs_the_loader_and_is_replayed_from_then_on(change):
    calls = []
    layer = OneWeight(lambda p, t: (calls.append(1), p.copy_(t)))
    for seed, changed in ((1, False), (2, True), (3, True)):
        tensor = weight(16, 32, seed=seed)
        with olq.session(layer) as session:
            session.feed("weight", change(tensor) if changed else tensor)
            replayed = session.commit().replayed
        given = change(tensor).contiguous().bfloat16() if changed else tensor
        assert stored_bytes(layer) == whole_bytes(layer, given)
    assert (replayed, len(calls)) == (1, 2)


def test_a_plan_key_that_changes_runs_the_loader():
    expert_map = {"weight": 0}
    calls = []

    def loader(parameter, tensor):
        calls.append(1)
        parameter.copy_(tensor)

    layer = OneWeight(loader)
    for key, expected in ((0, 1), (0, 1), (1, 2), (1, 2)):
        expert_map["weight"] = key
        with olq.session(layer, plan_key=expert_map.get) as session:
            session.feed("weight", weight(16, 32))
        assert len(calls) == expected


def test_plans_can_be_forgotten_and_switched_off():
    model = Fused()
    for seed, expected in ((1, 4), (2, 0)):
        model.calls = []
        olq.load(model, iter(sources(seed).items()))
        assert len(model.calls) == expected
    olq.forget_plans(model)
    model.calls = []
    olq.reload(model, iter(sources(3).items()))
    assert len(model.calls) == 4
    model.calls = []
    olq.reload(model, iter(sources(4).items()), replay=False)
    assert len(model.calls) == 4


def test_copies_of_a_model_record_plans_of_their_own():
    model = fresh()
    olq.load(model, state(Small()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = as_bytes(model)
        assert olq.reload(twin, state(Small())).replayed == 0
        assert olq.reload(twin, state(Small())).replayed == 5
        assert as_bytes(model) == before


def test_a_session_that_failed_leaves_no_plan():
    layer = OneWeight(lambda p, t: p.copy_(t))
    session = olq.session(layer).begin()
    session.feed("weight", weight(16, 32))
    session.abort()
    with olq.session(layer) as session:
        session.feed("weight", weight(16, 32))
        assert session.commit().replayed == 0


def test_the_same_name_twice_is_an_error_also_when_it_is_replayed():
    model, weights = live(), state(Small())
    olq.reload(model, weights)
    for stable in ("transient", "stable"):
        with olq.session(model, sources=stable) as session:
            for name, tensor in weights.items():
                session.feed(name, tensor)
            with pytest.raises(CoverageError, match=r"arrived twice[\s\S]*'b\.weight', and then 'b\.weight'"):
                session.feed("b.weight", weights["b.weight"] + 1)
    wanted = live()
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)


def test_names_that_overlap_are_found_whichever_is_replayed():
    def loader(parameter, tensor, rows):
        parameter[rows[0] : rows[1]].copy_(tensor)

    layer = OneWeight(loader)
    values = weight(16, 32)
    for cut in (8, 4):
        with olq.session(layer) as session:
            session.feed("weight", values[:cut], (0, cut))
            session.feed("weight", values[cut:], (cut, 16))
    with olq.session(layer) as session:
        session.feed("weight", values[:8], (0, 8))
        with pytest.raises(CoverageError, match=r"arrived twice"):
            session.feed("weight", values[4:], (4, 16))
        session.feed("weight", values[8:], (8, 16))


@pytest.mark.parametrize("stable", ["transient", "stable"])
@pytest.mark.parametrize("params", [{"granularity": "tensor"}, {"granularity": "channel"}], ids=str)
def test_a_replayed_tensor_with_nan_is_refused_and_may_be_fed_again(params, stable):
    layer = OneWeight(
        lambda p, t, i: p[8 * i : 8 * i + 8].copy_(t), method="fp8", params=params, parts=(8, 8)
    )
    values = weight(16, 32)
    bad = values.clone()
    bad[3, 5] = float("nan")

    def feed_both(session, source):
        session.feed("weight", source[:8], 0)
        session.feed("weight", source[8:], 1)

    def feed_both_and_flush(session, source):
        feed_both(session, source)
        session.flush()

    with olq.session(layer) as session:
        feed_both(session, values)
    with olq.session(layer, sources=stable) as session:
        with pytest.raises(NonFiniteError, match=r"weight\[3, 5\]"):
            feed_both_and_flush(session, bad)
        session.feed("weight", values[:8], 0)
        if stable == "transient":
            session.feed("weight", values[8:], 1)
        session.commit()
    assert stored_bytes(layer) == whole_bytes(layer, values)


def test_stable_weights_are_read_at_the_flush_and_everything_else_at_the_feed():
    """A loader may look at what has memory, so that only what is quantized may wait."""
    model, weights = live(), state(Small())
    olq.reload(model, weights)
    for stable in ("transient", "stable"):
        first, second = state(Small()), state(Small())
        buffers = {n: t.clone() for n, t in first.items()}
        with olq.session(model, sources=stable) as session:
            for name, buffer in buffers.items():
                session.feed(name, buffer)
            for name, buffer in buffers.items():
                buffer.copy_(second[name])
            session.flush()
            for buffer in buffers.values():
                buffer.fill_(7)
        wanted = live()
        late = {n for n in ("a.weight", "b.weight", "head.weight") if stable == "stable"}
        olq.load(wanted, {n: (second if n in late else first)[n] for n in first})
        assert as_bytes(model) == as_bytes(wanted)


def test_flush_belongs_to_an_open_session():
    session = olq.session(live())
    with pytest.raises(StateError, match=r"flush\(\) is not legal now"):
        session.flush()


def test_an_abort_with_a_queue_has_written_nothing():
    model, weights = live(), state(Small())
    olq.reload(model, weights)
    before = as_bytes(model)
    session = olq.session(model, sources="stable").begin()
    session.feed("a.weight", weights["a.weight"] * 2)
    session.abort()
    olq.reload(model, weights)
    assert as_bytes(model) == before


def test_a_tied_head_is_fed_by_every_load():
    model = olq.prepare(Small(tie=True))
    for _ in range(3):
        weights = state(Small(tie=True))
        del weights["head.weight"]
        olq.reload(model, weights)
        wanted = olq.prepare(Small(tie=True))
        olq.load(wanted, weights)
        assert as_bytes(model) == as_bytes(wanted)


def test_no_source_is_held_after_the_flush():
    import gc
    import weakref

    model = live()
    olq.reload(model, state(Small()))
    with olq.session(model, sources="stable") as session:
        alive = []
        for name, tensor in state(Small()).items():
            alive.append(weakref.ref(tensor))
            session.feed(name, tensor)
        del tensor
        session.flush()
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]


def test_bytes_of_plain_parameters_are_replayed_too():
    model = Fused()
    for seed in (1, 2):
        olq.load(model, iter(sources(seed).items()))
    assert bytes_of(model.norm) == bytes_of(sources(2)["norm"])


def test_a_parameter_whose_memory_was_taken_away_is_refused_by_name():
    """Not by what a recorded copy would raise."""
    model, weights = live(), state(Small())
    olq.reload(model, weights)
    model.a.bias.data = torch.empty(0, dtype=torch.bfloat16)
    with pytest.raises(SourceError, match=r"a\.bias"):
        olq.reload(model, weights)


@pytest.fixture
def judged_later(monkeypatch):
    """As on a GPU: what was queued is looked at once, in the commit."""
    monkeypatch.setattr(quantized, "waits", lambda device: True)


@pytest.mark.usefixtures("judged_later")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_what_is_judged_at_the_commit_is_refused_by_its_weight(method, value):
    name, params = method
    model, cold = Fused(name, **params), Fused(name, **params)

    def run(weights):
        with olq.session(model, sources="stable") as session:
            session.load(iter(weights.items()))
            session.flush()
            return session.commit()

    run(sources(1))
    assert run(sources(2)).replayed == 4
    bad = sources(3)
    bad["k"][3, 5] = value
    with pytest.raises(NonFiniteError, match=r"where: +weight\n.*1 weights with a scale that is NaN"):
        run(bad)
    with pytest.raises(StateError, match="whose load failed"):
        model.quant_method.apply(model, torch.randn(1, 64))
    run(sources(4))
    olq.load(cold, iter(sources(4).items()))
    assert as_bytes(model) == as_bytes(cold)


@pytest.mark.usefixtures("judged_later")
def test_a_weight_is_judged_when_it_is_whole():
    layer = OneWeight(lambda p, t, i: p[8 * i : 8 * i + 8].copy_(t))
    values = weight(16, 32)
    spoiled = values.clone()
    spoiled[0, 0] = float("nan")
    with olq.session(layer) as session:
        for i in range(2):
            session.feed("weight", values[8 * i : 8 * i + 8], i)
    session = olq.session(layer, sources="stable").begin()
    session.feed("weight", spoiled[:8], 0)
    session.flush()
    with pytest.raises(CoverageError, match="512 elements"):  # the other half's scales may be anything yet
        session.commit()
    session.feed("weight", spoiled[8:], 1)
    with pytest.raises(NonFiniteError, match="1 weights with a scale that is NaN"):
        session.commit()
    session.abort()


@pytest.mark.usefixtures("judged_later")
def test_what_another_thread_has_claimed_and_not_written_is_not_judged():
    """Its scales may be anything yet: NaN here."""
    torch.use_deterministic_algorithms(True)  # `empty` gives NaN
    layer = OneWeight(lambda p, t, i: p[8 * i : 8 * i + 8].copy_(t))
    values = weight(16, 32)
    try:
        with olq.session(layer) as session:
            for i in range(2):
                session.feed("weight", values[8 * i : 8 * i + 8], i)
        session = olq.session(layer, sources="stable", shadow="device").begin()
        session.feed("weight", values[:8], 0)
        session.feed("weight", values[8:], 1)
        late = session._replay._queue.pop()  # as if another thread were about to write it
        session.flush()
        session._replay._queue.append(late)
        session.commit()
    finally:
        torch.use_deterministic_algorithms(False)
    assert stored_bytes(layer) == whole_bytes(layer, values)
