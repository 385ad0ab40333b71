"""Sessions that meet, are dropped, interrupted or ended from elsewhere: right bytes, or an error that names it."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import StateError
from olq.reload.region import whole
from reload.engine_layers import OneWeight, OwnLoop, bytes_of, stored_bytes, weight, whole_bytes
from reload.fused_model import Fused, cold, feed, recorded, sources
from reload.small_models import TOKENS, Small, as_bytes, live, places, state


def other(**options: bool) -> dict[str, Tensor]:
    """Another checkpoint of `Small`."""
    return state(Small(**options))


# Sessions in each other's way


@pytest.mark.parametrize("options", [{}, {"shadow": "device"}, {"scope": ["a"]}, {"scope": ["emb"]}], ids=str)
@pytest.mark.parametrize("later", [{}, {"shadow": "device"}, {"scope": ["b"]}], ids=str)
def test_a_session_in_which_nothing_arrived_makes_way_and_is_over(options, later):
    model, weights = live(), other()
    before = as_bytes(model)
    first = olq.session(model, **options).begin()
    second = olq.session(model, **later).begin()
    for call in (first.commit, first.abort, lambda: first.feed("a.weight", weights["a.weight"])):
        with pytest.raises(StateError, match="found:  a session that is aborted"):
            call()
    second.abort()
    model(TOKENS)
    assert as_bytes(model) == before
    olq.reload(model, weights)
    wanted = live()
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)


@pytest.mark.parametrize("options", [{}, {"shadow": "device"}, {"scope": ["emb"]}], ids=str)
def test_a_session_in_which_something_arrived_stays_whatever_it_was(options):
    model, weights = live(), other()
    session = olq.session(model, **options).begin()
    session.feed("emb.weight", weights["emb.weight"])
    with pytest.raises(StateError, match=r"open already.*\n.*emb\.weight"):
        olq.session(model).begin()
    if "scope" not in options:
        for name in weights.keys() - {"emb.weight"}:
            session.feed(name, weights[name])
    session.commit()
    assert as_bytes(model)["emb.weight"] == bytes_of(weights["emb.weight"])


@pytest.mark.parametrize(
    "options", [{}, {"shadow": "device"}, {"scope": ["a", "emb"]}, {"scope": ["emb"]}], ids=str
)
def test_a_session_that_was_dropped_counts_as_aborted(options):
    model, weights = live(), other()
    before, at = as_bytes(model), places(model)
    session = olq.session(model, **options).begin()
    session.feed("emb.weight", weights["emb.weight"])
    del session
    gc.collect()
    if "shadow" in options:
        with olq.session(model, shadow="host") as session:
            assert session.status().missing
            model(TOKENS)
            session.load(weights)
    else:
        with pytest.raises(
            StateError, match=r"can be called.*\n.*\n.*after it had written 1 parameters: emb\.weight"
        ):
            olq.session(model, scope=["a"]).begin()
        with pytest.raises(StateError, match=r"after it had written 1 parameters: emb\.weight"):
            model(TOKENS)
        olq.reload(model, weights)
    wanted = live()
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted) != before
    assert places(model) == at


def test_a_begin_that_fails_leaves_the_model_as_it_was():
    model = live()
    before, at = as_bytes(model), places(model)
    model.register_buffer("lost", torch.empty(3, device="meta"), persistent=False)
    for options in ({}, {"shadow": "device"}, {"scope": ["a"]}):
        with pytest.raises(StateError, match="A buffer that stands in no checkpoint has no values"):
            olq.session(model, **options).begin()
    del model.lost
    model(TOKENS)
    assert (as_bytes(model), places(model)) == (before, at)


def test_an_engines_own_loop_that_was_not_begun_makes_way():
    model = live()
    before = as_bytes(model)
    olq.initialize_layerwise_reload(model)
    olq.session(model).begin().abort()
    model(TOKENS)
    assert as_bytes(model) == before


def test_of_two_models_with_a_common_layer_one_is_loaded_at_a_time():
    layer, weights = OneWeight(None), {"layer.weight": weight(16, 32), "own.weight": weight(16, 32, seed=1)}
    models = []
    for _ in range(2):
        model = nn.Module()
        model.own, model.layer = OneWeight(None), layer
        olq.load(model, weights)
        models.append(model)
    first = olq.session(models[0]).begin()
    second = olq.session(models[1]).begin()
    second.feed("layer.weight", weight(16, 32, seed=2))
    with pytest.raises(StateError, match="a session that is aborted"):
        first.feed("layer.weight", weight(16, 32, seed=3))
    with pytest.raises(StateError, match=r"open already.*\n.*layer\.weight"):
        olq.session(models[0]).begin()
    second.feed("own.weight", weight(16, 32, seed=2))
    second.commit()
    assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=2))
    assert stored_bytes(models[0].own) == whole_bytes(layer, weight(16, 32, seed=1))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_with_an_open_session_is_nobodys(make_copy):
    model, weights = live(), other()
    session = olq.session(model).begin()
    twin = make_copy(model)
    olq.reload(twin, weights)
    session.load(weights)
    session.commit()
    assert as_bytes(model) == as_bytes(twin)
    with olq.session(model, shadow="device"):
        with pytest.raises(StateError, match="can't be copied or pickled while"):
            make_copy(model)
        olq.session(model).begin().abort()
    assert as_bytes(make_copy(model)) == as_bytes(model)


@pytest.mark.parametrize("stable", ["transient", "stable"])
def test_a_feed_that_comes_after_the_abort_writes_nothing(stable):
    """A thread may have passed the check of the session when another aborts it."""
    model, weights = live(), other()
    olq.reload(model, weights)
    before = as_bytes(model)
    session = olq.session(model, sources=stable).begin()
    progress = session.names.routes["a.weight"]
    session.abort()
    with pytest.raises(StateError, match=r"the abort of this load"):
        progress.arrive(whole(progress.parameter.shape), other()["a.weight"], "a.weight")
    model(TOKENS)
    assert as_bytes(model) == before


# The end of a load


def test_a_session_ends_once():
    model = recorded()
    session = olq.session(model).begin()
    feed(session, sources(2))
    session.commit()
    for call in (session.commit, session.abort, session.flush, lambda: feed(session, sources(3))):
        with pytest.raises(StateError, match="a session that is committed"):
            call()
    assert session.status().missing == ()
    assert as_bytes(model) == cold(sources(2))


def test_a_shadow_load_cant_be_ended_by_the_engines_call():
    model = recorded()
    before = as_bytes(model)
    session = olq.session(model, shadow="device").begin()
    feed(session, sources(2))
    with pytest.raises(StateError, match="A shadow load can be ended by its session only"):
        olq.finalize_layerwise_processing(model)
    assert model.quant_generation == 2
    session.commit()
    assert as_bytes(model) == cold(sources(2)) != before


@pytest.mark.parametrize("shadow", [None, "device"])
@pytest.mark.parametrize("through", ["feed", "load"])
def test_an_interrupt_inside_a_loader_is_an_abort(shadow, through):
    class Interrupted(Fused):
        stop = False

        def load_shard(self, parameter: Tensor, tensor: Tensor, shard: str) -> None:
            if self.stop and shard == "k":
                parameter.narrow(0, 48, 8).copy_(tensor[:8])
                raise KeyboardInterrupt
            super().load_shard(parameter, tensor, shard)

    model = Interrupted()
    olq.load(model, iter(sources(1).items()))
    model.stop = True
    with pytest.raises(KeyboardInterrupt), olq.session(model, shadow=shadow, replay=False) as session:
        feed(session, sources(2)) if through == "feed" else session.load(iter(sources(2).items()))
    model.stop = False
    if shadow:
        assert as_bytes(model) == cold(sources(1))
        model.quant_method.apply(model, torch.ones(1, 64))
    else:
        with pytest.raises(StateError, match=r"after it had written 2 parameters: weight, norm"):
            model.quant_method.apply(model, torch.ones(1, 64))
    olq.reload(model, iter(sources(3).items()))
    assert as_bytes(model) == cold(sources(3))


def test_an_engines_own_loop_and_plans_do_not_disturb_each_other():
    model = OwnLoop(2)
    for seed in range(4):
        tensors = {f"layers.{i}.weight": weight(16, 32, seed=seed + i) for i in (0, 1)}
        tensors["norm"] = torch.full((8,), float(seed))
        if seed == 2:
            olq.initialize_layerwise_reload(model)
            model.load_weights(iter(tensors.items()))
            olq.finalize_layerwise_processing(model)
        else:
            assert olq.load(model, iter(tensors.items())).replayed == (3 if seed else 0)
        for i, layer in enumerate(model.layers):
            assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=seed + i))
        assert model.norm.tolist() == [float(seed)] * 8


# Casts, buffers, ties, what is derived


def test_a_cast_between_loads_is_one_of_what_is_not_quantized():
    model, twin = recorded(), recorded()
    for seed in (2, 3):
        model.half()
        twin.half()
        olq.reload(model, iter(sources(seed).items()))
        olq.reload(twin, iter(sources(seed).items()), replay=False)
        assert as_bytes(model) == as_bytes(twin)
        assert torch.equal(model.norm, sources(seed)["norm"].half())


def test_a_shadow_load_leaves_buffers_alone_that_nobody_loads():
    model, weights = live(), other()
    model.register_buffer("steps", torch.zeros(2))
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    session = olq.session(model, shadow="device").begin()
    session.load({**weights, "steps": torch.full((2,), 5.0)})
    model.table.mul_(2)
    session.commit()
    session = olq.session(model, shadow="device").begin()
    for name, tensor in weights.items():
        session.feed(name, tensor)
    model.steps.add_(1)
    session.commit()
    assert (model.steps.tolist(), model.table.tolist()) == ([6.0, 6.0], [0.0, 2.0, 4.0])


@pytest.mark.parametrize("shadow", ["device", "host"])
@pytest.mark.parametrize("names", [["emb.weight"], ["head.weight"], ["emb.weight", "head.weight"]], ids=str)
def test_a_quantized_head_follows_its_embedding_in_a_shadow_load(shadow, names):
    model, wanted = (olq.prepare(Small(tie=True)) for _ in range(2))
    for _ in range(2):
        weights = other(tie=True)
        given = {n: t for n, t in weights.items() if n not in ("emb.weight", "head.weight") or n in names}
        olq.reload(model, given, shadow=shadow)
        olq.load(wanted, given)
        assert as_bytes(model) == as_bytes(wanted)


@pytest.mark.parametrize("shadow", [None, "device"])
def test_what_is_derived_from_what_is_derived_follows_a_partial_load(shadow):
    model = live()
    olq.derive(model.a, "mirror", lambda a: olq.dequantize(a, dtype=torch.float32))
    olq.derive(model.b, "sums", lambda b: model.a.mirror.sum(1), reads=[(model.a, "mirror")])
    olq.reload(model, other(), shadow=shadow)
    for names, ran in ((["b.weight"], ()), (["a.weight", "a.bias"], ("a.mirror", "b.sums"))):
        weights = other()
        report = olq.reload(model, {n: weights[n] for n in names}, scope=names, shadow=shadow)
        assert report.derived == ran
        assert torch.equal(model.b.sums, olq.dequantize(model.a, dtype=torch.float32).sum(1))
