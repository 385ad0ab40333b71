"""Failures of memory, by kind: what is left over, what grows, and what a report says about bytes (docs/failures.md)."""

import gc
import math
import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.alloc import audit
from olq.testing.memory import measure_memory
from reload.plans import METHODS, RegionLayer, kernel_bytes, method_id, row_boxes
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state

EACH_METHOD = pytest.mark.parametrize("method", METHODS, ids=method_id)


def checkpoints() -> list[dict[str, Tensor]]:
    """Two, of different values and scales."""
    return [state(Small()), {name: -37 * t for name, t in state(Small()).items()}]


def config(method: tuple[str, dict[str, str]]) -> olq.QuantConfig:
    return olq.QuantConfig(method=method[0], params=method[1])


@EACH_METHOD
@pytest.mark.parametrize("junk", [0x00, 0x7F, 0xFF])
def test_nothing_that_was_in_memory_before_a_reload_is_in_it_afterwards(method, junk):
    """Every byte of every parameter and kernel tensor, padding included, comes from this load."""
    model, weights = live(config(method)), checkpoints()[1]
    for parameter in model.parameters():
        parameter.detach().view(torch.uint8).fill_(junk)
    olq.reload(model, weights)
    cold = fresh(config(method))
    olq.load(cold, weights)
    assert as_bytes(model) == as_bytes(cold)


@EACH_METHOD
@pytest.mark.parametrize(("parts", "columns"), [((40, 40), 96), ((5,), 33), ((130, 70, 3), 100)])
def test_padding_between_and_behind_parts_is_written_by_each_load(method, parts, columns):
    layers = [RegionLayer(*method, parts, columns) for _ in range(2)]
    sources = [torch.randn(sum(parts), columns).bfloat16() * size for size in (1, 50)]
    for layer, order in zip(layers, ((0, 1), (1,)), strict=True):
        for i in order:
            if i and layer is layers[0]:
                for parameter in layer.parameters():
                    parameter.detach().view(torch.uint8).fill_(0x7F)  # NaN as fp8 and as an exponent's scale
            with olq.session(layer) as session:
                for box in row_boxes(parts, columns):
                    session.feed("weight", sources[i][box[0].start : box[0].stop], box)
    assert kernel_bytes(layers[0]) == kernel_bytes(layers[1])


@EACH_METHOD
def test_a_reload_leaves_no_byte_more(method):
    model, (a, b) = live(config(method)), checkpoints()
    olq.reload(model, a)  # what is made once
    for weights in (b, a, b):
        assert measure_memory(lambda weights=weights: olq.reload(model, weights) and None).final_bytes == 0


def resident_bytes() -> int:
    """Memory of this process, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to ask for resident memory")
def test_two_hundred_reloads_keep_host_memory_flat():
    """Neither objects nor pages: a source that each reload kept would be half a megabyte a time."""
    rows, columns = 512, 512
    layers = [nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)]
    model = olq.prepare(nn.Sequential(*layers), olq.QuantConfig(params={"granularity": "tensor"}))
    at = places(model)

    def run(count: int) -> tuple[int, int]:
        for i in range(count):
            halves = torch.full((rows, columns), float(i % 2 + 1), dtype=torch.bfloat16).split(rows // 2)
            olq.reload(model, {"0.weight": torch.cat(halves)})
        gc.collect()
        return len(gc.get_objects()), resident_bytes()

    run(20)
    objects, resident = run(20)
    objects_later, resident_later = run(180)
    assert objects_later - objects < 90
    assert resident_later - resident < 16 << 20
    assert places(model) == at


def test_after_a_load_no_tensor_of_full_precision_is_left():
    """Not in a list, a closure, a view or a dict of loaded parameters: nowhere."""
    rows, columns = 96, 160
    with olq.meta_parameters():
        model = nn.Sequential(*(nn.Linear(columns, rows, False, dtype=torch.bfloat16) for _ in range(3)))
    olq.prepare(model, olq.QuantConfig(params={"granularity": "tensor"}))
    report = olq.load(model, ((f"{i}.weight", torch.randn(rows, columns).bfloat16()) for i in range(3)))
    gc.collect()
    alive = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not o.is_meta]
    assert not [t for t in alive if t.is_floating_point() and t.numel() == rows * columns]
    assert len([t for t in alive if t.dtype == torch.uint8 and t.shape == (rows, columns)]) >= 3
    assert len(report.weights) == 3


@EACH_METHOD
def test_bytes_in_a_report_are_those_that_are_held(method):
    model = live(config(method))
    (a, _) = checkpoints()
    report = olq.reload(model, a)
    held = dict(model.named_parameters())
    for weight in report.weights:
        mine = [t for name, t in held.items() if name == weight.name or name.startswith(f"{weight.name}_")]
        assert weight.kernel_bytes == sum(t.untyped_storage().nbytes() for t in mine)
        assert weight.bits_per_element == 8 * weight.kernel_bytes / math.prod(weight.shape)
    assert report.kernel_bytes + report.kept_bytes == sum(t.untyped_storage().nbytes() for t in held.values())


def test_the_high_water_mark_of_what_waited_is_reported_and_grows_with_disorder():
    """A tensor-wide scale needs all of its rows: layers that are open together wait together."""
    rows, columns = 64, 32
    tensor_wide = olq.QuantConfig(params={"granularity": "tensor"})
    whole = rows * columns * 2
    for order, waited in ((sorted, 1), (lambda pieces: sorted(pieces, key=lambda p: p[1]), 4)):
        with olq.meta_parameters():
            model = nn.Sequential(*(nn.Linear(columns, rows, False, dtype=torch.bfloat16) for _ in range(4)))
        olq.prepare(model, tensor_wide)
        with olq.session(model) as session:
            for i, half in order([(i, half) for i in range(4) for half in range(2)]):
                with session.counter().scope(f"{i}.{half}"):
                    band = slice(half * rows // 2, (half + 1) * rows // 2)
                    model[i].weight[band].copy_(torch.ones(rows // 2, columns, dtype=torch.bfloat16))
            report = session.commit()
        assert waited * whole / 2 <= report.staged_peak_bytes <= waited * whole


def test_olq_keeps_no_tensor_of_its_own_between_loads():
    """No table or permutation that is made once and then found under memory which an engine has let go of."""

    def everything() -> None:
        for method in METHODS:
            model = live(config(method))
            olq.reload(model, checkpoints()[0], measure_error=True)
            model(TOKENS)
            olq.dequantize(model.a)
            olq.dummy_init(model)

    def alive() -> dict[int, tuple[torch.Size, torch.dtype]]:
        gc.collect()
        return {id(o): (o.shape, o.dtype) for o in gc.get_objects() if issubclass(type(o), Tensor)}

    with audit():  # its own, so that the test's audit holds none of them
        before = alive()
        everything()
    assert {key: facts for key, facts in alive().items() if key not in before} == {}
