"""Odd uses of partial, shadow and replayed loads: each gives the right bytes, or an error that names what is odd."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, StateError
from olq.methods.state import find_state
from reload.engine_layers import OneWeight, OwnLoop, stored_bytes, weight, whole_bytes
from reload.fused_model import Fused, cold, feed, recorded, sources
from reload.small_models import Small, as_bytes, live, places, state


def other(**options: bool) -> dict[str, Tensor]:
    """Another checkpoint of `Small`."""
    return state(Small(**options))


def saved(model: nn.Module) -> dict[str, Tensor]:
    """The state of a live model, as it is saved."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Saved codes


@pytest.mark.parametrize("shadow", [None, "device", "host"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_codes_of_a_saved_model_load_in_place_and_beside(shadow, tie):
    model, source = (olq.prepare(Small(tie=tie)) for _ in range(2))
    before, at = as_bytes(model), places(model)
    with olq.session(model, shadow=shadow) as session:
        session.load(saved(source))
    assert as_bytes(model) == as_bytes(source) != before
    assert places(model) == at


def test_codes_of_a_saved_model_load_into_a_scope():
    model, source = live(), live()
    before, wanted = as_bytes(model), as_bytes(source)
    with olq.session(model, scope=["a"]) as session:
        session.load({name: tensor for name, tensor in saved(source).items() if name.startswith("a.")})
    for name, found in as_bytes(model).items():
        assert found == (wanted if name.startswith("a.") else before)[name], name


def test_a_commit_that_named_what_is_missing_can_be_repeated_with_saved_codes():
    model, source = live(), live()
    weights = saved(source)
    late = weights.pop("a.bias")
    session = olq.session(model).begin()
    for name, tensor in weights.items():
        session.feed(name, tensor)
    for _ in range(2):
        with pytest.raises(CoverageError, match=r"1 of 5.*\n.*a\.bias \(nothing arrived\)"):
            session.commit()
    session.feed("a.bias", late)
    session.commit()
    assert as_bytes(model) == as_bytes(source)


# What a plan depends on


def in_one_bucket(weights: dict[str, Tensor], order: list[str]) -> dict[str, Tensor]:
    """The tensors as views of one buffer, in which they lie in some order; under their names in the old one."""
    flat = torch.cat([weights[name].flatten() for name in order])
    parts = dict(zip(order, flat.split([weights[name].numel() for name in order]), strict=True))
    return {name: parts[name].view(tensor.shape) for name, tensor in weights.items()}


class DelaysByOne(Fused):
    """Its loop writes each tensor when the next one has come."""

    def load_weights(self, weights) -> None:
        last: list[tuple[str, Tensor]] = []
        for item in weights:
            super().load_weights(last)
            last = [item]
        super().load_weights(last)


@settings(max_examples=10)
@given(orders=st.lists(st.permutations(["q", "norm", "k", "v"]), min_size=3, max_size=3))
def test_a_loop_that_writes_a_neighbour_in_the_same_bucket_is_not_replayed(orders):
    model = DelaysByOne()
    for seed, order in enumerate(orders):
        weights = sources(seed)
        report = olq.load(model, iter(in_one_bucket(weights, order).items()))
        assert report.replayed == 0
        assert as_bytes(model) == cold(weights)


def test_tensors_of_one_bucket_are_replayed_wherever_they_lie():
    model = recorded()
    for order in (["q", "k", "norm", "v"], ["v", "norm", "q", "k"]):
        with olq.session(model) as session:
            feed(session, in_one_bucket(sources(2), order))
            assert session.commit().replayed == 4
        assert as_bytes(model) == cold(sources(2))


@pytest.mark.parametrize("columns", [slice(0, 64), slice(64, 128), slice(0, 128, 2)], ids=str)
def test_columns_of_a_wider_tensor_are_replayed_where_a_loader_takes_parts_of_them(columns):
    def loader(parameter: Tensor, tensor: Tensor) -> None:
        parameter[:8].copy_(tensor[8:])
        parameter[8:].copy_(tensor[:8])

    layer = OneWeight(loader, columns=64)
    for seed in (1, 2):
        wide = weight(16, 128, seed=seed)
        with olq.session(layer) as session:
            session.feed("weight", wide[:, columns])
            assert session.commit().replayed == seed - 1
        assert stored_bytes(layer) == whole_bytes(layer, wide[:, columns].roll(8, 0).contiguous())


def test_the_other_columns_of_a_wider_tensor_are_not_part_of_what_was_fed():
    kept = {}

    def loader(parameter: Tensor, tensor: Tensor, half: int) -> None:
        kept[half] = tensor
        if half:
            parameter[:, :32].copy_(kept[0])
            parameter[:, 32:].copy_(kept[1])

    layer = OneWeight(loader, columns=64)
    for seed in (1, 2, 3):
        both = weight(16, 64, seed=seed)
        left = both[:, :32] if seed == 1 else both[:, :32].clone()
        with olq.session(layer) as session:
            session.feed("weight", left, 0)
            session.feed("weight", both[:, 32:], 1)
        assert stored_bytes(layer) == whole_bytes(layer, both)


@pytest.mark.parametrize("method", ["fp8", "nvfp4", "mxfp8"])
def test_a_layer_that_was_replaced_by_one_of_another_method_is_not_cut_by_the_old_plan(method):
    def loader(parameter: Tensor, tensor: Tensor, half: int) -> None:
        parameter[8 * half : 8 * half + 8].copy_(tensor)

    params = {"granularity": "tensor"} if method == "fp8" else {}
    model, values = nn.Module(), weight(16, 32)
    for kind, options in (("fp8", {"granularity": "channel"}), (method, params), (method, params)):
        if not hasattr(model, "layer") or model.layer.quant_method.name != kind or options == params:
            model.layer = OneWeight(loader, method=kind, params=options)
        with olq.session(model) as session:
            for half in (0, 1):
                session.feed("layer.weight", values[8 * half : 8 * half + 8].clone(), half)
        assert stored_bytes(model.layer) == whole_bytes(model.layer, values)


def test_another_loader_in_the_place_of_the_recorded_one_is_run():
    layer = OneWeight(lambda p, t: p.copy_(t))
    for loader, change in ((None, 1), (lambda p, t: p.copy_(t.flip(0)), -1)):
        if loader is not None:
            vars(find_state(layer).load_parameters["weight"])["weight_loader"] = loader
        with olq.session(layer) as session:
            session.feed("weight", weight(16, 32))
        wanted = weight(16, 32) if change > 0 else weight(16, 32).flip(0)
        assert stored_bytes(layer) == whole_bytes(layer, wanted)


def test_a_plan_of_a_session_with_a_plan_key_is_not_used_without_one():
    layer, calls = OneWeight(lambda p, t: (calls.append(1), p.copy_(t))), []
    for plan_key in (str, None, None):
        with olq.session(layer, plan_key=plan_key) as session:
            session.feed("weight", weight(16, 32))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("at", "replayed"),
    [((0, 8), 2), ([0, 8], 0), (slice(0, 8), 0), (torch.tensor([0, 8]), 0)],
    ids=["tuple", "list", "slice", "tensor"],
)
def test_loader_arguments_of_any_kind_are_passed_on_and_only_plain_ones_replayed(at, replayed):
    def loader(parameter: Tensor, tensor: Tensor, rows) -> None:
        first = rows.start if isinstance(rows, slice) else int(rows[0])
        parameter[first : first + 8].copy_(tensor)

    def moved(by: int):
        if isinstance(at, slice):
            return slice(at.start + by, at.stop + by)
        return at + by if isinstance(at, Tensor) else type(at)(i + by for i in at)

    layer = OneWeight(loader)
    for seed in (1, 2):
        values = weight(16, 32, seed=seed)
        with olq.session(layer) as session:
            for by in (0, 8):
                session.feed("weight", values[by : by + 8], moved(by))
            report = session.commit()
        assert stored_bytes(layer) == whole_bytes(layer, values)
    assert report.replayed == replayed


def test_false_and_zero_are_two_shards_inside_tuples_too():
    def loader(parameter: Tensor, tensor: Tensor, shard: tuple[int, object]) -> None:
        parameter[8 * (shard[0] is False) :][:8].copy_(tensor)

    layer = OneWeight(loader)
    for seed in (1, 2):
        values = weight(16, 32, seed=seed)
        with olq.session(layer) as session:
            session.feed("weight", values[:8], (0, "a"))
            session.feed("weight", values[8:], (False, "a"))
        assert stored_bytes(layer) == whole_bytes(layer, values)


# Tied parameters under several names


@pytest.mark.parametrize("stable", ["transient", "stable"])
def test_a_tied_parameter_under_both_names_is_compared_also_when_each_has_a_plan(stable):
    model = nn.Module()
    model.layer = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    model.one = nn.Parameter(torch.zeros(8))
    model.two = model.one
    olq.prepare(model)
    base = {"layer.weight": weight(16, 32)}
    for name in ("one", "two"):
        olq.reload(model, {**base, name: torch.ones(8)})
    olq.reload(model, {**base, "one": torch.full((8,), 2.0), "two": torch.full((8,), 2.0)}, sources=stable)
    assert model.one.tolist() == [2.0] * 8
    with pytest.raises(CoverageError, match=r"two names with different values.*\n.*two \(tied to one\)"):
        olq.reload(model, {**base, "one": torch.ones(8), "two": torch.zeros(8)}, sources=stable)


def test_a_layer_under_two_names_is_compared_with_what_is_still_queued():
    model = nn.Module()
    model.one = model.two = OneWeight(None)
    olq.load(model, {"one.weight": weight(16, 32)})
    for names in (["one.weight"], ["one.weight", "two.weight"]):
        with olq.session(model, sources="stable") as session:
            for name in names:
                session.feed(name, weight(16, 32, seed=2))
    assert stored_bytes(model.one) == whole_bytes(model.one, weight(16, 32, seed=2))


# Loops of engines


@pytest.mark.parametrize("stable", ["transient", "stable"])
def test_a_loop_that_transforms_what_it_copied_at_its_end_finds_it_there(stable):
    class AddsOne(Fused):
        def load_weights(self, weights) -> None:
            super().load_weights(weights)
            self.norm.data.add_(1)

    model = AddsOne()
    for seed in (1, 2, 3):
        report = olq.load(model, iter(sources(seed).items()), sources=stable)
        assert torch.equal(model.norm, sources(seed)["norm"] + 1)
    assert report.replayed == 4


@pytest.mark.parametrize("stable", ["transient", "stable"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_threads_that_feed_and_flush_at_once_give_the_bytes_of_one(stable, kind):
    for seed in range(2, 8):
        model, weights = recorded(kind), sources(seed)
        with olq.session(model, sources=stable) as session, ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(feed, session, {name: tensor}) for name, tensor in weights.items()]
            for job in [*jobs, *(pool.submit(session.flush) for _ in range(4))]:
                job.result()
            assert session.commit().replayed == 4
        assert as_bytes(model) == cold(weights, kind)


class Sub(Tensor):
    """A subclass that changes nothing."""


def inference(tensor: Tensor) -> Tensor:
    """A copy that was made in inference mode."""
    with torch.inference_mode():
        return tensor.clone()


ODD_SOURCES = {
    "at an offset": lambda t: torch.cat([torch.full((7,), 9.0).bfloat16(), t.flatten()])[7:].view(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape),
    "with grad": lambda t: t.clone().requires_grad_(),
    "of inference mode": inference,
    "a parameter": nn.Parameter,
    "negated lazily": torch._neg_view,
    "a subclass": lambda t: t.as_subclass(Sub),
    "transposed": lambda t: t.t().contiguous().t(),
}


@pytest.mark.parametrize("stable", ["transient", "stable"])
@pytest.mark.parametrize("kind", ODD_SOURCES)
def test_odd_sources_are_replayed_to_the_bytes_of_a_first_load(kind, stable):
    model = recorded()
    for seed in (2, 3):
        weights = {name: ODD_SOURCES[kind](tensor) for name, tensor in sources(seed).items()}
        with olq.session(model, sources=stable) as session:
            feed(session, weights)
            session.commit()
        assert as_bytes(model) == cold(weights)
        assert not any(p.requires_grad for p in model.parameters())
        assert type(model.norm) is nn.Parameter


@pytest.mark.parametrize("loader", [None, lambda p, t: p.data.copy_(t)], ids=["plain", "loader"])
@pytest.mark.parametrize("through", ["feed", "loop"])
@pytest.mark.parametrize("shadow", [None, "device"])
def test_a_bias_is_loaded_alone_while_its_weight_stays_quantized(shadow, through, loader):
    class Biased(OwnLoop):
        def __init__(self) -> None:
            super().__init__(0)
            self.layers.append(OneWeight(lambda p, t: p.copy_(t), bias="after"))
            if loader is not None:
                vars(self.layers[0].bias)["weight_loader"] = loader

    model = Biased()
    first = {"layers.0.weight": weight(16, 32), "layers.0.bias": weight(16), "norm": torch.ones(8)}
    olq.load(model, iter(first.items()))
    before = stored_bytes(model.layers[0])
    with olq.session(model, scope=["layers.0.bias"], shadow=shadow) as session:
        if through == "feed":
            session.feed("layers.0.bias", weight(16, seed=2))
        else:
            session.load(iter({"layers.0.bias": weight(16, seed=2)}.items()))
    assert torch.equal(model.layers[0].bias, weight(16, seed=2))
    assert stored_bytes(model.layers[0]) == before
    with pytest.raises((CoverageError, StateError)):
        olq.reload(model, iter(first.items()), scope=["layers.0.bias"], replay=False)
