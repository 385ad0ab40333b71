"""How fast a GPU moves bytes: a plain copy, and the fastest rate at which a process has seen one."""

import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks import runner


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
    """A copy of 1 GiB; `fastest` is the largest rate, in bytes a millisecond, that a row's copies had in the median.

    A copy that runs between products is slower at times, since they heat the GPU: by 15 % in rows that were kept.
    Products of few rows of x are not slower then, and a share of a slow copy's rate would be too large. So shares are
    worked out when all rows are there.
    """

    def __init__(self) -> None:
        self.source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda").random_(0, 3)
        self.target = torch.empty_like(self.source)
        self.fastest = 0.0
        runner.warm_up()
        self.seen([milliseconds(self.run) for _ in range(50)])

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
