"""Loaders, sessions and loading loops in several threads, and one load inside another."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.errors import CoverageError
from reload.engine_layers import (
    OneWeight,
    OwnLoop,
    call,
    stored_bytes,
    weight,
    whole_bytes,
)
from reload.plans import METHODS, method_id

# Threads


def test_a_loader_with_threads_of_its_own_is_not_seen_and_the_error_says_so():
    def loader(p: Tensor, x: Tensor) -> None:
        thread = threading.Thread(target=lambda: p.copy_(x))
        thread.start()
        thread.join()

    layer = OneWeight(loader)
    olq.initialize_online_processing(layer)
    call(layer, weight(16, 32))
    with pytest.raises(CoverageError) as error:
        olq.finalize_layerwise_processing(layer)
    assert "weight (nothing arrived)" in error.value.where
    assert "a loader that copies in threads of its own is not seen" in error.value.remedy


def pieces_of(count: int, parts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(layer, part, half of the columns)"""
    return [(i, part, half) for i in range(count) for part in range(len(parts)) for half in (0, 1)]


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_loaders_called_by_many_threads_give_the_bytes_of_one(method, seed):
    name, params = method
    parts, columns = (20, 7), 48

    def loader(p: Tensor, x: Tensor, part: int, half: int) -> None:
        start = 0 if part == 0 else 20
        p[start : start + parts[part], 24 * half : 24 * half + 24].copy_(x)

    model = nn.ModuleList([
        OneWeight(loader, method=name, params=params, parts=parts, columns=columns, bias="after") for _ in range(3)
    ])  # fmt: skip
    sources = [weight(27, 48, seed=i) for i in range(3)]
    olq.initialize_online_processing(model)
    work = [*pieces_of(3, parts), *((i, -1, 0) for i in range(3))]
    order = torch.randperm(len(work), generator=torch.Generator().manual_seed(seed)).tolist()

    def do(at: int) -> None:
        i, part, half = work[at]
        if part < 0:
            call(model[i], weight(27, seed=i), name="bias")
        else:
            rows = sources[i].split(parts)[part]
            call(model[i], rows[:, 24 * half : 24 * half + 24].clone(), part, half)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(do, order))
    olq.finalize_layerwise_processing(model)
    for i, layer in enumerate(model):
        assert stored_bytes(layer) == whole_bytes(layer, sources[i])
        assert torch.equal(layer.bias, weight(27, seed=i))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_one_session_fed_by_many_threads_gives_the_bytes_of_one(seed):
    model = OwnLoop(6)
    tensors = {f"layers.{i}.weight": weight(16, 32, seed=i) for i in range(6)} | {"norm": torch.arange(8.0)}
    names = list(tensors)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    with olq.session(model) as session, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: session.feed(names[i], tensors[names[i]].clone()), order))
        report = session.commit()
    assert len(report.weights) == 6
    for i, layer in enumerate(model.layers):
        assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=i))
    assert model.norm.tolist() == list(range(8))


@pytest.mark.parametrize("name", ["layers.0.weight", "norm"])
def test_the_same_name_from_two_threads_is_a_duplicate_every_time(name):
    source = weight(16, 32) if name != "norm" else torch.ones(8)
    other, value = ("norm", torch.ones(8)) if name != "norm" else ("layers.0.weight", weight(16, 32))

    def feed(session: olq.Session) -> bool:
        try:
            session.feed(name, source)
        except CoverageError:
            return False
        return True

    for _ in range(15):
        with olq.session(OwnLoop(1)) as session, ThreadPoolExecutor(3) as pool:
            fed = list(pool.map(feed, [session] * 3))
            session.feed(other, value)
        assert sum(fed) == 1


class PullsAhead(OwnLoop):
    """Its load_weights reads the next tensors in a thread while it copies the last one."""

    def load_weights(self, weights) -> None:
        ahead: queue.Queue = queue.Queue(maxsize=2)

        def pull() -> None:
            for item in weights:
                ahead.put(item)
            ahead.put(None)

        thread = threading.Thread(target=pull)
        thread.start()
        super().load_weights(iter(ahead.get, None))
        thread.join()


def test_a_loop_that_pulls_ahead_in_a_thread_loses_nothing():
    tensors = {f"layers.{i}.weight": weight(16, 32, seed=i) for i in range(8)} | {"norm": torch.arange(8.0)}
    for _ in range(10):
        model = PullsAhead(8)
        report = olq.load(model, iter(tensors.items()))
        assert not report.surplus
        for i, layer in enumerate(model.layers):
            assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=i))


class PoolLoop(OwnLoop):
    """Its load_weights calls the loaders in a pool of threads."""

    def load_weights(self, weights) -> None:
        parameters = dict(self.named_parameters())
        with ThreadPoolExecutor(3) as pool:
            for name, tensor in weights:
                loader = getattr(parameters[name], "weight_loader", None)
                if loader is None:
                    parameters[name].data.copy_(tensor)
                else:
                    pool.submit(loader, parameters[name], tensor)


def test_a_loop_with_a_pool_of_loaders_loses_nothing():
    tensors = {f"layers.{i}.weight": weight(16, 32, seed=i) for i in range(8)} | {"norm": torch.arange(8.0)}
    model = PoolLoop(8)
    olq.load(model, iter(tensors.items()))
    for i, layer in enumerate(model.layers):
        assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=i))


def test_a_load_inside_the_load_of_another_model():
    """A loop that brings up a draft model on the way."""
    draft, reports = OwnLoop(2), []
    inner = {
        "layers.0.weight": weight(16, 32, seed=7),
        "layers.1.weight": weight(16, 32, seed=8),
        "norm": weight(8),
    }

    class WithDraft(OwnLoop):
        def load_weights(self, weights) -> None:
            for i, item in enumerate(weights):
                super().load_weights([item])
                if i == 1:
                    reports.append(olq.load(draft, inner.items()))
                if i == 2:
                    with olq.session(plain) as session:
                        session.feed("0.weight", weight(16, 32, seed=9))
                        session.feed("1.weight", weight(16, 32, seed=9))

    plain = nn.ModuleList([OneWeight(None), OneWeight(lambda p, x: p.copy_(x))])
    model = WithDraft(3)
    tensors = {f"layers.{i}.weight": weight(16, 32, seed=i) for i in range(3)} | {"norm": torch.arange(8.0)}
    olq.load(model, iter(tensors.items()))
    for i, layer in enumerate(model.layers):
        assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=i))
    for i, layer in enumerate(draft.layers):
        assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=7 + i))
    for layer in plain:
        assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=9))
    assert len(reports[0].weights) == 2
