"""How long a GPU takes: graphs of many calls, time between two events, and a copy's rate as a limit."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks import runner

CALLS = 256
"""Of a graph, where one takes microseconds: what starts it is less than 0.3 % of it."""

CACHE = 256 << 20
"""Bytes of which no L2 cache holds more than half: an H200's has 50 MB, a B200's 126."""


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

    def settle(self) -> None:
        """Read so much that what the copy left in the cache has been written, which would delay what comes next.

        Waits for it, so that what comes next begins on an idle GPU, as everything else does.
        """
        source = self.source.reshape(-1)
        source[: CACHE // source.element_size()].amax().item()

    def seen(self, times: Sequence[float]) -> float:
        """Take note of a row's copies, in milliseconds; terabytes a second, read and written, of their median."""
        rate = 2 * self.source.numel() * self.source.element_size() / statistics.median(times)
        self.fastest = max(self.fastest, rate)
        return rate / 1e9

    def milliseconds(self, moved: int) -> float:
        """What moving so many bytes takes at the fastest rate so far."""
        return moved / self.fastest


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """All names, in rounds that each begin with another."""
    order = list(names)
    for _ in range(rounds):
        order.append(order.pop(0))
        yield from order


def in_turns(
    runs: Mapping[str, tuple[Callable[[], object], int]], copy: Copy, rounds: int, untimed: int
) -> dict[str, list[float]]:
    """Milliseconds of one call of each run, and of "copy", which take `turns`.

    Args:
        runs: what to run, by name, and how many calls that is.
        copy: runs once a round.
        rounds: that count.
        untimed: rounds before them.
    """
    times: dict[str, list[float]] = {name: [] for name in (*runs, "copy")}
    for name in turns(times, rounds + untimed):
        if name == "copy":
            times[name].append(milliseconds(copy.run))
            copy.settle()
        else:
            run, count = runs[name]
            times[name].append(milliseconds(run) / count)
    return {name: values[untimed:] for name, values in times.items()}


def copy_of_a_gibibyte() -> Copy:
    """Of random numbers; it has run 50 times on a warm GPU, which count as a row's."""
    copy = Copy(torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda").random_(0, 3))
    runner.warm_up()
    copy.seen([milliseconds(copy.run) for _ in range(50)])
    return copy
