"""Law 5: peak memory while loading, by the allocator's own events, operator scratch included."""

import gc
import random
import weakref

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.testing.memory import measure_memory
from reload.plans import METHODS, method_id

#: What olq may take beside kernel tensors, sources and waiting units: chunks of the quantizer, one piece of a stage.
#: The quantizer keeps buffers for two threads at the most.
WORKSPACE = 8_000_000
LAYERS, ROWS, COLUMNS = 4, 1088, 1024
LAYER_BYTES = ROWS * COLUMNS * 2


def make_model(method: str, params: dict[str, str]) -> nn.Module:
    """Linear layers that are ready to load."""
    with olq.meta_parameters():
        layers = [nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
    return olq.prepare(nn.Sequential(*layers), olq.QuantConfig(method=method, params=params))


def kernel_bytes(model: nn.Module) -> int:
    """Bytes of kernel tensors and tags."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_in_file_order_the_peak_is_the_result_one_layer_and_the_workspace(method):
    model = make_model(*method)

    def weights():
        for i in range(LAYERS):
            yield f"{i}.weight", torch.full((ROWS, COLUMNS), 0.5, dtype=torch.bfloat16)

    trace = measure_memory(lambda: olq.load(model, weights()))
    assert trace.peak_bytes <= kernel_bytes(model) + LAYER_BYTES + WORKSPACE
    assert (
        trace.peak_bytes >= kernel_bytes(model) + LAYER_BYTES / 2
    )  # the measurement sees the source and the result


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_in_shuffled_order_only_units_that_must_wait_are_held(method):
    """Quarters of every layer, cut along K, in random order: many units of many layers wait at one time."""
    name, params = method
    model = make_model(name, params)
    quarter = COLUMNS // 4
    pieces = [(i, q) for i in range(LAYERS) for q in range(4)]
    random.Random(1).shuffle(pieces)
    arrived: dict[int, int] = {}
    waits = name == "nvfp4" or (name == "fp8" and params["granularity"] in ("tensor", "channel"))
    most = 0
    for i, _ in pieces:
        arrived[i] = arrived.get(i, 0) + 1
        most = max(most, sum(LAYER_BYTES for count in arrived.values() if count < 4) if waits else 0)

    def run() -> None:
        with olq.session(model) as session:
            for i, q in pieces:
                with session.counter().scope(f"{i}, quarter {q}"):
                    view = model[i].weight[:, q * quarter : (q + 1) * quarter]
                    view.copy_(torch.full((ROWS, quarter), 0.5, dtype=torch.bfloat16))

    trace = measure_memory(run)
    source = LAYER_BYTES // 4
    # The unit that is being completed is counted among those that wait until its call returns.
    assert trace.peak_bytes <= kernel_bytes(model) + most + (LAYER_BYTES if waits else 0) + source + WORKSPACE


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_reload_in_place_needs_no_second_model(method):
    model = make_model(*method)
    weights = {f"{i}.weight": torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16) for i in range(LAYERS)}
    olq.load(model, weights)
    trace = measure_memory(lambda: olq.reload(model, weights))
    assert trace.peak_bytes <= WORKSPACE


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_no_source_outlives_its_feed(method):
    model = make_model(*method)
    alive: list[weakref.ref[Tensor]] = []

    def weights():
        for i in range(LAYERS):
            tensor = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
            alive.append(weakref.ref(tensor))
            yield f"{i}.weight", tensor
            del tensor
            assert alive[-1]() is None

    gc.collect()
    gc.disable()  # references must be gone by themselves
    try:
        olq.load(model, weights())
    finally:
        gc.enable()
    assert not any(ref() is not None for ref in alive)
