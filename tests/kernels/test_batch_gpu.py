"""Batches on a GPU: the order of streams, graphs, no waiting, bounded memory, launches without Triton's front."""

import pytest
import torch
from kernels.batches import METHODS, Spec, Weights, assert_alike, write_together

from olq.kernels import launching, tabled
from olq.kernels.batch import Batch

pytestmark = pytest.mark.cuda
SHAPE = {"parts": (96, 32), "columns": 512, "count": 3}


def specs() -> list[Spec]:
    return [Spec(method, **SHAPE) for method in METHODS]


def written_on_cpu(seed: int) -> Weights:
    want = Weights(specs(), "cpu", seed)
    want.write_()
    return want


def waiting_for(weights: Weights, jobs) -> Batch:
    waiting = Batch()
    for job, source in zip(jobs, weights.sources, strict=True):
        assert waiting.add(job, source)
    return waiting


def test_sources_may_change_as_soon_as_a_launch_returns():
    weights = Weights(specs(), "cuda")
    jobs = weights.jobs()
    for seed in (0, 100):
        weights.feed(seed)
        torch.cuda._sleep(20_000_000)
        waiting_for(weights, jobs).launch()
        for source in weights.sources:
            source.fill_(torch.nan)
        assert_alike(weights, written_on_cpu(seed))


def test_a_table_lives_until_its_launches_are_done():
    weights = Weights(specs(), "cuda")
    jobs = weights.jobs()
    for _ in range(3):
        torch.cuda._sleep(20_000_000)
        waiting_for(weights, jobs).launch()
        # What the allocators hand out again, of every size that tables and scratch may have had.
        for words in (64, 512, 4096, 65536, 262144):
            torch.zeros(words, dtype=torch.int64, device="cuda").fill_(-1)
            torch.zeros(words, dtype=torch.int64, pin_memory=True).fill_(-1)
    assert_alike(weights, written_on_cpu(0))


def test_a_batch_runs_on_the_current_stream():
    weights = Weights(specs(), "cuda")
    jobs = weights.jobs()
    side = torch.cuda.Stream()
    for seed in (0, 100):
        fresh = Weights(specs(), "cuda", seed)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)  # longer than the CPU takes for what follows
            for source, new in zip(weights.sources, fresh.sources, strict=True):
                source.copy_(new)
            waiting_for(weights, jobs).launch()
            assert not side.query()
        side.synchronize()
        assert_alike(weights, written_on_cpu(seed))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
def test_no_launch_waits_for_the_gpu():
    weights = Weights([Spec(method, parts=(2,), columns=32, count=1500) for method in METHODS], "cuda")
    jobs = weights.jobs()
    write_together(weights, jobs)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        write_together(weights, jobs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_holds_single_launches():
    weights = Weights(specs(), "cuda")
    jobs = weights.jobs()
    for job, source in zip(jobs, weights.sources, strict=True):
        job.run(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_together(weights, jobs)
    fresh = Weights(specs(), "cuda", 100)
    for source, new in zip(weights.sources, fresh.sources, strict=True):
        source.copy_(new)
    graph.replay()
    assert_alike(weights, written_on_cpu(100))


def test_a_second_batch_goes_without_tritons_front(monkeypatch):
    weights = Weights(specs(), "cuda")
    jobs = weights.jobs()
    write_together(weights, jobs)
    if not launching._known():
        pytest.skip("launches of this Triton release go through its front")

    def refuse(name):
        raise AssertionError(f"{name} went through Triton's front")

    monkeypatch.setattr(launching, "_kernel", refuse)
    weights.feed(100)
    write_together(weights, jobs)
    assert_alike(weights, written_on_cpu(100))


def test_other_releases_of_triton_go_through_its_front(monkeypatch):
    monkeypatch.setattr(launching, "_known", lambda: False)
    weights = Weights(specs(), "cuda")
    jobs = weights.jobs()
    for seed in (0, 100):
        weights.feed(seed)
        write_together(weights, jobs)
        assert all(stage.again is None for job in jobs for stage in job.group.stages)
        assert_alike(weights, written_on_cpu(seed))


def test_memory_is_the_table_and_scratch_of_one_launch(monkeypatch):
    monkeypatch.setattr(tabled, "CACHE", 8 * 256 * 512 * 2)
    weights = Weights([Spec(METHODS[5], parts=(256,), columns=512, count=64)], "cuda")
    jobs = weights.jobs()
    write_together(weights, jobs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    write_together(weights, jobs)
    scratch = 8 * 4 * jobs[0].group.scratch
    assert torch.cuda.max_memory_allocated() - before <= 3 * 64 * 32 + scratch + 2 * 512


@pytest.mark.parametrize("place", ["dense", "odd", "region", "transposed"])
def test_many_weights_of_many_programs(place):
    shapes = [
        Spec(method, lead=lead, parts=(130, 61), columns=1100, place=place, count=3, singly=singly)
        for method in METHODS
        for lead, singly in (((), False), ((3,), False), ((3,), True))
    ]
    got, want = Weights(shapes, "cuda"), Weights(shapes, "cpu")
    write_together(got, got.jobs())
    want.write_()
    assert_alike(got, want)
