"""Who arrived, who did not, who came twice, who is unknown: by name, and before anything is written."""

import gc
import logging
import time
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, LayoutError, LoaderError, SourceError, StateError, UnknownNameError
from olq.reload.online import load_of
from olq.reload.region import Coverage, slices
from reload.engine_layers import OneWeight, bytes_of, call, stored_bytes, whole_bytes


def weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Block(nn.Module):
    """q and k fused with a shard id, an output projection, a norm, and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = OneWeight(self.load_shard, parts=(16, 8), columns=32)
        self.o_proj = OneWeight(None, bias="after")
        self.norm = nn.LayerNorm(32, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    @staticmethod
    def load_shard(parameter: Tensor, source: Tensor, shard: str) -> None:
        start, rows = {"q": (0, 16), "k": (16, 8)}[shard]
        parameter[start : start + rows].copy_(source)


def make_model() -> nn.Module:
    return nn.ModuleDict({"a": Block(), "b": Block()})


def sources(seed: int = 0) -> list[tuple[str, Tensor, tuple[str, ...]]]:
    """What a whole load feeds."""
    found: list[tuple[str, Tensor, tuple[str, ...]]] = []
    for name in ("a", "b"):
        found += [
            (f"{name}.qk_proj.weight", weight(16, 32, seed=seed + 1), ("q",)),
            (f"{name}.qk_proj.weight", weight(8, 32, seed=seed + 2), ("k",)),
            (f"{name}.o_proj.weight", weight(16, 32, seed=seed + 3), ()),
            (f"{name}.o_proj.bias", weight(16, seed=seed + 4), ()),
            (f"{name}.norm.weight", weight(32, seed=seed + 5), ()),
            (f"{name}.norm.bias", weight(32, seed=seed + 6), ()),
        ]
    return found


def feed_all(session: olq.Session, seed: int = 0, skip: tuple[int, ...] = ()) -> None:
    for i, (name, tensor, shard) in enumerate(sources(seed)):
        if i not in skip:
            session.feed(name, tensor, *shard)


def state_bytes(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}


# Missing


def test_what_is_missing_is_named_with_counts_and_regions_and_may_follow():
    model = make_model()
    with olq.session(model) as session:
        feed_all(session, skip=(1, 3, 6, 11))
        with pytest.raises(CoverageError) as error:
            session.commit()
        assert error.value.problem == "Parameters did not arrive completely: 4 of 12."
        assert error.value.where == (
            "a.qk_proj.weight (512 of 768 elements arrived; missing [16:24, 0:32]), "
            "b.qk_proj.weight (256 of 768 elements arrived; missing [0:16, 0:32]), "
            "a.o_proj.bias (nothing arrived), b.norm.bias (nothing arrived)"
        )
        assert error.value.found == "6 of 12 parameters complete"
        assert error.value.need == "every element of every parameter"
        assert "feed what is missing" in error.value.remedy
        for i in (1, 3, 6, 11):
            name, tensor, shard = sources()[i]
            session.feed(name, tensor, *shard)
        session.commit()
    whole = make_model()
    with olq.session(whole) as session:
        feed_all(session)
    assert state_bytes(model) == state_bytes(whole)


def test_many_missing_parameters_are_counted():
    model = nn.ModuleList([OneWeight(None) for _ in range(14)])
    with pytest.raises(CoverageError) as error, olq.session(model):
        pass
    assert error.value.problem == "Parameters did not arrive completely: 14 of 14."
    assert error.value.where.endswith("9.weight (nothing arrived) and 4 more")


@pytest.mark.unaudited(reason="the load is not finished")
def test_gaps_of_a_strided_load_are_shown_as_boxes():
    layer = OneWeight(lambda p, x: p[::2, 3:30].copy_(x))
    olq.initialize_online_processing(layer)
    call(layer, weight(8, 27))
    with pytest.raises(CoverageError, match=r"216 of 512 elements arrived; missing \[.*:.*\]"):
        olq.finalize_layerwise_processing(layer)
    missing = torch.ones(16, 32, dtype=torch.bool)
    missing[::2, 3:30] = False
    shown = torch.zeros(16, 32, dtype=torch.bool)
    for box in load_of(layer).weights["weight"].coverage.missing(limit=100):
        shown[slices(box)] = True
    assert torch.equal(shown, missing)


@pytest.mark.unaudited(reason="the load is not finished")
@pytest.mark.parametrize("stand_in", ["duplicate", "double write", "surplus"])
def test_nothing_stands_in_for_a_missing_element(stand_in):
    """Counts of elements would be right in each case; the set of them is not."""

    def loader(p: Tensor, x: Tensor, start: int) -> None:
        p[start : start + 8].copy_(x)
        if stand_in == "double write":
            p[start : start + 8].copy_(x)

    session = olq.session(nn.ModuleList([OneWeight(loader)]), allow_surplus=["other"]).begin()
    session.feed("0.weight", weight(8, 32), 0)
    if stand_in == "duplicate":
        with pytest.raises(CoverageError, match="arrived twice"):
            session.feed("0.weight", weight(8, 32), 0)
    if stand_in == "surplus":
        session.feed("other", weight(8, 32))
    with pytest.raises(
        CoverageError, match=r"0\.weight \(256 of 512 elements arrived; missing \[8:16, 0:32\]\)"
    ):
        session.commit()


def test_nothing_was_quantized_if_nothing_arrived(monkeypatch):
    model = nn.ModuleList([OneWeight(None)])
    monkeypatch.setattr(type(model[0].quant_method), "quantize_", lambda *args: pytest.fail("quantized junk"))
    with pytest.raises(CoverageError), olq.session(model):
        pass
    assert not list(model[0].quant_state.kernel)


# Twice


@pytest.mark.parametrize("at", range(6))
def test_a_second_arrival_is_an_error_that_names_both_and_the_load_goes_on(at):
    model = make_model()
    name, tensor, shard = sources()[at]
    with olq.session(model) as session:
        session.feed(name, tensor, *shard)
        with pytest.raises(CoverageError) as error:
            session.feed(name, tensor + 1, *shard)
        assert error.value.problem == "The same elements arrived twice."
        assert error.value.where.startswith(f"{name}[")
        assert error.value.found == f"{name!r}, and then {name!r}"
        feed_all(session, skip=(at,))
    whole = make_model()
    with olq.session(whole) as session:
        feed_all(session)
    assert state_bytes(model) == state_bytes(whole)


def test_overlapping_calls_of_engine_loaders_name_both_calls():
    layer = Block().qk_proj
    olq.initialize_online_processing(layer)
    call(layer, weight(16, 32), "q")
    with pytest.raises(CoverageError) as error:
        layer.weight.weight_loader(layer.weight, weight(16, 32), shard="q")
    assert error.value.found == "\"layer.weight ('q')\", and then \"layer.weight (shard='q')\""
    assert error.value.where == "layer.weight[0:16, 0:32]"
    call(layer, weight(8, 32), "k")
    olq.finalize_layerwise_processing(layer)


class Tied(nn.Module):
    """Two names for one memory: as one object, or as two that share it."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 32, dtype=torch.bfloat16)
        self.head = nn.Linear(32, 6, bias=False, dtype=torch.bfloat16)
        self.head.weight = nn.Parameter(self.embed.weight.data) if shared else self.embed.weight
        self.layer = OneWeight(None)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head"), ("head", "embed")])
def test_tied_parameters_arrive_under_either_name_or_both(shared, names):
    model = Tied(shared)
    tensors = {f"{name}.weight": weight(6, 32) for name in names}
    olq.load(model, tensors | {"layer.weight": weight(16, 32)})
    assert torch.equal(model.head.weight, weight(6, 32))
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


@pytest.mark.parametrize("shared", [True, False])
def test_tied_parameters_with_different_values_are_a_contradiction(shared):
    model = Tied(shared)
    with olq.session(model) as session:
        session.feed("embed.weight", weight(6, 32))
        with pytest.raises(CoverageError) as error:
            session.feed("head.weight", weight(6, 32, seed=1))
        assert "head.weight" in error.value.where
        assert "embed.weight" in str(error.value)
        session.feed("layer.weight", weight(16, 32))


# Unknown, surplus


def test_unknown_names_are_all_listed_with_close_ones_before_anything_is_written():
    model = make_model()
    with olq.session(model) as session:
        feed_all(session)
    before = state_bytes(model)
    bad = {
        "a.o_proj.weight": weight(16, 32, seed=9),
        "model.language_model.a.o_proj.weight": weight(16, 32),
        "a.o_proj.lora_A": weight(4, 32),
        "a.o_porj.bias": weight(16),
    }
    with pytest.raises(UnknownNameError) as error:
        olq.reload(model, bad)
    assert error.value.problem == "3 names belong to no parameter of this model."
    assert "'a.o_porj.bias' (did you mean 'a.o_proj.bias'" in error.value.found
    assert "'model.language_model.a.o_proj.weight' (did you mean " in error.value.found
    assert "allow_surplus" in error.value.remedy
    assert state_bytes(model) == before
    model["a"].o_proj.quant_method.apply(model["a"].o_proj, weight(2, 32))  # still live


def test_more_than_ten_unknown_names_are_counted():
    bad = {f"x{i}.weight": weight(1) for i in range(13)}
    with pytest.raises(UnknownNameError) as error:
        olq.load(nn.ModuleList([OneWeight(None)]), bad)
    assert error.value.problem.startswith("13 names")
    assert error.value.found.endswith(" and 3 more")


def test_surplus_is_allowed_by_pattern_only_and_reported():
    model = nn.ModuleList([OneWeight(None)])
    tensors = {"0.weight": weight(16, 32), "0.rotary.inv_freq": weight(4), "vision.0.weight": weight(4)}
    with pytest.raises(UnknownNameError, match=r"vision\.0\.weight"):
        olq.load(model, tensors, allow_surplus=["re:.*inv_freq"])
    report = olq.load(model, tensors, allow_surplus=["re:.*inv_freq", "re:vision\\..*"])
    assert set(report.surplus) == {"0.rotary.inv_freq", "vision.0.weight"}


def test_an_unknown_name_in_an_iterator_is_found_when_it_comes_and_only_it_is_lost():
    model = nn.ModuleList([OneWeight(None)])
    with olq.session(model) as session:
        with pytest.raises(UnknownNameError, match=r"did you mean '0\.weight'"):
            session.feed("0.wieght", weight(16, 32))
        session.feed("0.weight", weight(16, 32))
    assert stored_bytes(model[0]) == whole_bytes(model[0], weight(16, 32))


def test_buffers_may_arrive_and_need_not():
    model = make_model()
    with olq.session(model) as session:
        session.feed("a.steps", torch.tensor([1, 2, 3]))
        with pytest.raises(UnknownNameError):
            session.feed("a.cache", torch.ones(3))
        feed_all(session)
    assert model["a"].steps.tolist() == [1, 2, 3]
    assert model["b"].steps.tolist() == [0, 0, 0]


# Wrong tensors


@pytest.mark.parametrize("name", ["a.o_proj.weight", "a.o_proj.bias", "a.norm.weight", "a.steps"])
def test_a_wrong_shape_names_both_shapes_and_the_load_goes_on(name):
    model = make_model()
    with olq.session(model) as session:
        with pytest.raises(SourceError) as error:
            session.feed(name, torch.ones(5, 7))
        assert name in error.value.where
        assert "shape [5, 7]" in error.value.found
        assert str(list(dict(session.names.routes)[name].parameter.shape)) in error.value.need
        feed_all(session)


@pytest.mark.parametrize("name", ["a.o_proj.weight", "a.o_proj.bias", "a.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_codes_of_a_quantized_checkpoint_are_refused(name, dtype):
    model = make_model()
    tensor = next(t for n, t, _ in sources() if n == name)
    if dtype == torch.uint8 and tensor.dim() == 2:
        tensor = tensor[:, :16]  # two codes a byte
    with olq.session(model) as session:
        with pytest.raises((SourceError, LayoutError)) as error:
            session.feed(name, tensor.to(dtype))
        assert str(dtype) in error.value.found
        feed_all(session)


@pytest.mark.unaudited(reason="the load is not finished")
def test_codes_that_look_like_a_saved_weight_are_not_enough_by_themselves():
    model = nn.ModuleList([OneWeight(None)])
    session = olq.session(model).begin()
    session.feed("0.weight", torch.zeros(16, 32, dtype=torch.uint8))
    with pytest.raises(
        CoverageError, match=r"0\.weight_scale, 0\.weight_format \(the other tensors of this saved"
    ):
        session.commit()


# Around the session


def test_one_load_at_a_time_and_none_outside():
    model = make_model()
    session = olq.session(model)
    with pytest.raises(StateError, match=r"feed\(\) is not legal now"):
        session.feed("a.o_proj.weight", weight(16, 32))
    with session:
        feed_all(session)
        with pytest.raises(StateError, match="open already"):
            olq.session(model).begin()
    with pytest.raises(StateError, match="a session that is committed"):
        session.feed("a.o_proj.weight", weight(16, 32))
    with pytest.raises(StateError, match="no load is open"):
        model["a"].o_proj.bias.weight_loader(model["a"].o_proj.bias, weight(16))


def test_a_parameter_that_was_replaced_meanwhile_is_found():
    model = nn.ModuleList([OneWeight(None)])
    olq.initialize_online_processing(model)
    kept = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(16, 32), requires_grad=False)
    with pytest.raises(LoaderError, match=r"layer\.weight"):
        olq.finalize_layerwise_processing(model)
    model[0].weight = kept
    call(model[0], weight(16, 32))
    olq.finalize_layerwise_processing(model)


@pytest.mark.parametrize("what", ["new", "live"])
def test_an_abort_before_anything_was_written_changes_nothing(what):
    model = make_model()
    if what == "live":
        with olq.session(model) as session:
            feed_all(session)
        before, addresses = state_bytes(model), [p.data_ptr() for p in model.parameters()]
    session = olq.session(model).begin()
    session.abort()
    if what == "live":
        assert state_bytes(model) == before
        assert [p.data_ptr() for p in model.parameters()] == addresses
        model["a"].o_proj.quant_method.apply(model["a"].o_proj, weight(2, 32))
    with olq.session(model) as session:
        feed_all(session, seed=10)
    fresh = make_model()
    with olq.session(fresh) as session:
        feed_all(session, seed=10)
    assert state_bytes(model) == state_bytes(fresh)


@pytest.mark.parametrize("first", ["a.norm.weight", "a.o_proj.weight"])
def test_an_abort_after_a_write_leaves_no_layer_callable(first):
    model = make_model()
    with olq.session(model) as session:
        feed_all(session)
    session = olq.session(model).begin()
    session.feed(*next((n, t + 1) for n, t, _ in sources() if n == first))
    session.abort()
    for block in model.values():
        with pytest.raises(StateError, match="before its weights were complete"):
            block.o_proj.quant_method.apply(block.o_proj, weight(2, 32))


# Lifetime and cost


class OwnLoop(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OneWeight(lambda p, x: p.copy_(x)) for _ in range(count)])

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
            del tensor


@pytest.mark.parametrize("own_loop", [True, False])
def test_no_source_is_alive_when_the_next_one_is_asked_for(own_loop):
    model = OwnLoop(6)
    if not own_loop:
        model.load_weights = None
    alive: list[weakref.ref[Tensor]] = []

    def generator() -> Iterator[tuple[str, Tensor]]:
        for i in range(6):
            assert not [ref for ref in alive if ref() is not None]
            tensor = weight(16, 32, seed=i)
            alive.append(weakref.ref(tensor))
            yield f"layers.{i}.weight", tensor
            del tensor

    gc.disable()  # references, not the collector, have to let go
    try:
        olq.load(model, generator())
    finally:
        gc.enable()
    assert len(alive) == 6
    assert not [ref for ref in alive if ref() is not None]


def test_a_session_holds_no_source_after_feed_returns():
    model = make_model()
    gc.disable()
    try:
        with olq.session(model) as session:
            for name, tensor, shard in sources():
                source = tensor.clone()
                alive = weakref.ref(source)
                session.feed(name, source, *shard)
                del source
                assert alive() is None, name
    finally:
        gc.enable()


def test_many_arrivals_are_linear_and_quiet(monkeypatch, caplog):
    """Rows of two open layers, one by one, in random order, each under a name of its own."""
    rows = 2500

    def loader(p: Tensor, x: Tensor, row: int) -> None:
        p[row : row + 1].copy_(x)

    model = nn.ModuleList([OneWeight(loader, parts=(rows,), columns=16) for _ in range(2)])
    method = type(model[0].quant_method)
    quantize, calls = method.quantize_, []
    monkeypatch.setattr(method, "quantize_", lambda *args: calls.append(None) or True)
    olq.initialize_online_processing(model)
    x, seconds = weight(1, 16), []
    order = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(0)).tolist()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for at in order:
            start = time.thread_time()
            call(model[at % 2], x, at // 2)
            seconds.append(time.thread_time() - start)
    assert not caught
    assert not caplog.records
    assert len(calls) == 2 * rows
    fifth = len(order) // 5
    first, last = (sorted(part)[fifth // 2] for part in (seconds[:fifth], seconds[-fifth:]))
    assert last < 3 * first  # medians; what grows with the number of arrivals grows a hundredfold
    for layer in model:
        assert load_of(layer).weights["weight"].coverage.complete
        monkeypatch.setattr(method, "quantize_", quantize)
        progress = load_of(layer).weights["weight"]
        progress.coverage = Coverage((rows, 16))
        progress.arrive((range(rows), range(16)), weight(rows, 16), "all")  # no byte stays unwritten
    olq.finalize_layerwise_processing(model)


def test_coverage_of_many_names_stays_small():
    coverage = Coverage((64, 96, 40))
    pieces = [(expert, part) for expert in range(64) for part in range(3)]
    for i in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(1)).tolist():
        expert, part = pieces[i]
        box = (range(expert, expert + 1), range(32 * part, 32 * part + 32), range(40))
        assert coverage.find(box) is None
        coverage.add(box, f"expert {expert}, part {part}")
        assert coverage.find(box) == f"expert {expert}, part {part}"
        assert len(coverage._products) <= 8
    assert coverage.complete
    coverage.remove((range(7, 8), range(96), range(40)))
    assert coverage.missing() == [(range(7, 8), range(96), range(40))]
    assert coverage.find((range(6, 8), range(1), range(1))) == "expert 6, part 0"
    assert "expert 7, part 0" not in coverage.names
