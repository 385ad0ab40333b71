"""A batch writes the bytes of single calls, in few launches: under Triton's interpreter, and on a GPU."""

import gc
import importlib.util
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import (
    METHODS,
    SPECS,
    Spec,
    Weights,
    assert_alike,
    assert_written,
    launch,
    write_together,
)
from kernels.compare import DEVICES, fp8_call, weight

import olq
from numerics.cases import poison
from olq.errors import LayoutError, StateError
from olq.kernels import batch, launching, plans, tabled, tiles
from olq.kernels.batch import Batch, job_of
from olq.kernels.tabled import Stage
from olq.methods.base import Geometry


@pytest.fixture
def launches(monkeypatch):
    """Jobs of each launch that reads a table, as they happen."""
    counts: list[tuple[str, int]] = []
    run = Stage.run

    def counted(stage, table, at, count, stream):
        counts.append((stage.launch.kernel.split(".")[1], count))
        run(stage, table, at, count, stream)

    monkeypatch.setattr(Stage, "run", counted)
    return counts


@DEVICES
@settings(deadline=None, max_examples=25)
@given(specs=st.lists(SPECS, min_size=1, max_size=3), seed=st.integers(0, 999), sweeps=st.booleans())
def test_any_mix_writes_the_bytes_of_single_calls(device, specs, seed, sweeps):
    with pytest.MonkeyPatch.context() as patch:
        if sweeps:
            small_sweeps(patch)
        assert_written(specs, device, (seed,))


def small_sweeps(patch: pytest.MonkeyPatch) -> None:
    """A whole matrix takes several programs and tiles, as if it were large."""
    patch.setattr(tiles, "UNIT_ELEMENTS", 16)
    patch.setattr(tiles, "PROGRAMS", 6)
    patch.setattr(tiles, "_sweep", lambda n, k, tall, elements: tiles.Tile(1, 16, 1))


@DEVICES
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method(method, device, launches):
    assert_written([Spec(method, columns=72, count=3)], device)
    assert {count for _, count in launches} == {3}


@DEVICES
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_jobs_are_made_once_for_many_sources(method, device):
    specs = [Spec(method, count=2), Spec(method, parts=(5, 2), place="odd", count=2)]
    assert_written(specs, device, (0, 50, 100))


@DEVICES
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_more_jobs_than_a_grid_holds_take_more_launches(method, device, launches, monkeypatch):
    monkeypatch.setattr(tabled, "GRID", 5)
    small_sweeps(monkeypatch)
    assert_written([Spec(method, lead=(2,), count=5)], device)
    stages = len({name for name, _ in launches})
    assert [count for _, count in launches] == [2] * stages + [2] * stages + [1] * stages


@DEVICES
def test_sources_that_are_read_twice_take_turns_in_the_cache(device, launches, monkeypatch):
    nvfp4 = olq.get_method("nvfp4")
    spec = Spec(nvfp4, parts=(4,), columns=64, count=3)
    monkeypatch.setattr(tabled, "CACHE", 2 * 4 * 64 * 2)
    assert_written([spec, Spec(METHODS[0], parts=(4,), columns=64, count=3)], device)
    names = "amax_partials", "nvfp4_scale", "quantize_nvfp4"
    turns = [(name, 2) for name in names] + [(name, 1) for name in names]
    assert launches == [*turns, ("quantize_rows", 3)]


@DEVICES
def test_larger_sources_than_the_cache_holds_share_launches_up_to_a_number(device, launches, monkeypatch):
    monkeypatch.setattr(tabled, "CACHE", 1)
    monkeypatch.setattr(tabled, "LARGE", 2)
    small_sweeps(monkeypatch)
    assert_written([Spec(METHODS[1], count=3)], device)
    assert [count for _, count in launches] == [2, 2, 1, 1]


@DEVICES
@pytest.mark.parametrize("method", [METHODS[1], METHODS[5]], ids=repr)
def test_single_numbers_may_lie_at_any_address(method, device, launches, monkeypatch):
    # Tensor scales of experts are next to each other: not one in four is 16-byte aligned.
    small_sweeps(monkeypatch)
    assert_written([Spec(method, lead=(5,), parts=(4, 4), columns=64, count=2, singly=True)], device)
    parts_differ = method.name == "nvfp4"  # in the first row of their scale bytes
    assert {count for _, count in launches} == {10 if parts_differ else 20}


@DEVICES
def test_a_single_job_takes_the_single_launches(device, launches):
    assert_written([Spec(method, count=1, parts=(3 + i,)) for i, method in enumerate(METHODS)], device)
    assert launches == []


@DEVICES
def test_an_empty_batch_launches_nothing(device, launches):
    Batch().launch()
    assert launches == []


@DEVICES
def test_another_alignment_or_device_is_another_job(device, launches):
    weights = Weights([Spec(METHODS[0])], device)
    job, other = weights.jobs()
    waiting = Batch()
    (odd, _) = Weights([Spec(METHODS[0], place="odd")], device).sources
    assert not waiting.add(job, odd)
    if device == "cuda":
        assert not waiting.add(job, weights.sources[0].cpu())
    assert len(waiting) == 0
    assert job.group is other.group
    # A source that is better aligned than the first is welcome.
    unaligned = Weights([Spec(METHODS[0], place="odd")], device)
    jobs = unaligned.jobs()
    assert jobs[0].group is not job.group
    unaligned.sources = weights.sources
    write_together(unaligned, jobs)
    write_together(weights, [job, other])
    assert_alike(unaligned, written_on_cpu(weights))


def written_on_cpu(weights: Weights) -> Weights:
    want = Weights(weights.specs, "cpu")
    want.write_()
    return want


@DEVICES
def test_a_job_serves_in_many_batches_and_twice_in_one(device):
    weights = Weights([Spec(METHODS[5], count=2)], device)
    jobs = weights.jobs()
    first, second = Batch(), Batch()
    for job, source in zip(jobs, weights.sources, strict=True):
        assert first.add(job, source)
    write_together(weights, jobs, second)
    want = written_on_cpu(weights)
    assert_alike(weights, want)
    weights.kernel[0][""].fill_(0xA5)
    launch(first)
    weights.specs[0].method.write_padding_(weights.kernel[0], weights.specs[0].plan)
    assert_alike(weights, want)


@DEVICES
def test_nothing_is_kept_after_a_launch(device):
    weights = Weights([Spec(METHODS[0], count=2)], device)
    jobs = weights.jobs()
    waiting = Batch()
    sources = [torch.empty_like(source).copy_(source) for source in weights.sources]
    alive = [weakref.ref(source) for source in sources]
    for job, source in zip(jobs, sources, strict=True):
        waiting.add(job, source)
    del source, sources
    gc.collect()
    assert all(ref() is not None for ref in alive)  # they are not read yet
    launch(waiting)
    gc.collect()
    assert all(ref() is None for ref in alive)
    group = weakref.ref(jobs[0].group)
    del jobs, job
    gc.collect()
    assert group() is None


@DEVICES
def test_a_job_keeps_its_results_but_not_its_source(device):
    _, (source, codes, scale, *rest) = fp8_call(weight(4, 32), (1, 0))
    source, codes, scale = source.to(device), codes.to(device), scale.to(device)
    source_ref, codes_ref = weakref.ref(source), weakref.ref(codes)
    job = job_of([("quantize_fp8_", (source, codes, scale, *rest))])
    del source, codes
    gc.collect()
    assert job is not None
    assert source_ref() is None
    assert codes_ref() is not None


@DEVICES
def test_what_has_no_kernel_makes_no_job(device):
    w, codes, scale = weight(4, 32).to(device), poison(4, 32).to(device), torch.empty(4, 1, device=device)
    assert job_of([("quantize_fp8_", (w, codes, scale, 1, 0, False))]) is not None
    assert job_of([("quantize_fp8_", (w[:0], codes[:0], scale[:0], 1, 0, False))]) is None
    assert job_of([("dequantize_fp8_", (codes, scale, w, 1, 0))]) is None
    whole, grid = torch.empty(300, 640, device=device), torch.empty(1, 5, device=device)
    args = whole, whole.to(torch.uint8), grid, 0, 128, False
    assert job_of([("quantize_fp8_", args)]) is None


@DEVICES
def test_a_job_whose_kernel_is_gone_says_so(device, monkeypatch):
    weights = Weights([Spec(METHODS[0], count=1)], device)
    (job,) = weights.jobs()
    waiting = Batch()
    waiting.add(job, weights.sources[0])
    monkeypatch.setattr(batch.launching, "replay", lambda operator, args: False)
    monkeypatch.setattr(launching, "unavailable", lambda args: "triton is not installed")
    with pytest.raises(StateError) as raised:
        waiting.launch()
    assert str(raised.value).splitlines() == [
        "A job that had kernels has none now.",
        "  where:  torch.ops.olq.quantize_fp8_, in a batch",
        "  found:  triton is not installed",
        "  need:   a source of the shape, strides, dtype and device that the job was made for",
        "  remedy: make the job anew (olq.kernels.batch.job_of) where a source's signature changes",
    ]
    assert len(waiting) == 0


def test_a_job_reads_one_source():
    w, scale_2 = weight(4, 32), torch.empty(())
    calls = [
        ("nvfp4_tensor_scale_", (w, scale_2)),
        ("quantize_nvfp4_", (w.clone(), poison(4, 16), poison(4, 2), scale_2, "linear", 0, 1, 0)),
    ]
    with pytest.raises(LayoutError) as raised:
        job_of(calls)
    assert str(raised.value).splitlines() == [
        "Calls of one job read one source.",
        "  where:  torch.ops.olq.quantize_nvfp4_, in a batch",
        "  found:  another tensor than in the call before it",
        "  need:   the same tensor as the first argument of each call",
        "  remedy: make one job for each source",
    ]


def test_no_calls_make_no_job():
    assert job_of([]) is None


@pytest.mark.skipif(launching.interpreted(), reason="kernels are interpreted")
def test_where_no_kernel_runs_there_is_no_job():
    operator, args = fp8_call(weight(4, 32), (1, 0))
    assert job_of([(operator, args)]) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_launch_without_tritons_front_hands_over_every_argument(method, monkeypatch):
    small_sweeps(monkeypatch)
    plan = method.plan(Geometry((2,), (3,), 40), torch.bfloat16)
    tensors = {s: poison(*made.shape, dtype=made.dtype) for s, made in plan.tensors.items()}
    calls = method.calls(weight(2, 3, 40), tensors, plan, plan.whole(0))
    group = tabled.Group(calls, [plans.plan(operator, args) for operator, args in calls])
    table, got = torch.zeros(100, dtype=torch.int64), []
    launcher = SimpleNamespace(launch=lambda *args: got.append(args), launch_cooperative_grid=0, launch_pdl=0)
    for stage in group.stages:
        compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")
        stage.again = launching._Ready(compiled, stage.launch)
        stage.run(table, 12, 7, 99)
        x, y, z = stage.launch.grid
        before, rest = got[-1][:13], got[-1][13:]
        assert before == (x, y, 7 * z, 99, "function", 0, 0, None, None, "metadata", None, None, None)
        names = launching._kernel(stage.launch.kernel).arg_names
        handed = dict(zip(names, rest, strict=True))
        assert handed["table"] == table.data_ptr() + 12 * 8
        numbers = names[len(stage.columns) : len(stage.columns) + len(stage.launch.numbers)]
        assert tuple(handed[name] for name in numbers) == stage.launch.numbers
