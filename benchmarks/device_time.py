"""How long a GPU takes: graphs of many calls, time between two events, and a copy's rate as a limit."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import runner

CALLS = 256
"""Of a graph, where one takes microseconds: what starts it, and what a copy leaves to be written, is 0.3 % of it."""


def repeated(calls: Sequence[Callable[[], object]], least: int) -> tuple[Callable[[], None], int]:
    """A CUDA graph of all calls, so often that there are `least`, which holds their outputs; and how many there are."""
    every = [*calls] * -(-least // len(calls))
    for call in every:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in every:
            call()
    return graph.replay, len(every)


def milliseconds(run: Callable[[], object], times: int = 1) -> float:
    """One of so many runs, one after the other, between two events. An event costs some microseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


class Copy:
    """A plain copy of `source`; `fastest` is the largest rate, in bytes a millisecond, that it had in a row's median.

    A copy that runs between products is slower at times, since they heat the GPU: by 15 % in rows that were kept.
    Products of few rows of x are not slower then, and a share of a slow copy's rate would be too large. So shares are
    worked out when all rows are there.
    """

    def __init__(self, source: Tensor) -> None:
        self.source, self.target = source, torch.empty_like(source)
        self.fastest = 0.0

    def run(self) -> None:
        """Copy."""
        self.target.copy_(self.source)

    def seen(self, times: Sequence[float]) -> float:
        """Take note of a row's copies, in milliseconds; terabytes a second, read and written, of their median."""
        rate = 2 * self.source.numel() * self.source.element_size() / statistics.median(times)
        self.fastest = max(self.fastest, rate)
        return rate / 1e9

    def milliseconds(self, moved: int) -> float:
        """What moving so many bytes takes at the fastest rate so far."""
        return moved / self.fastest


def copy_of_a_gibibyte() -> Copy:
    """Of random numbers; it has run 50 times on a warm GPU, which count as a row's."""
    copy = Copy(torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda").random_(0, 3))
    runner.warm_up()
    copy.seen([milliseconds(copy.run) for _ in range(50)])
    return copy
