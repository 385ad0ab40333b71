"""How fast a GPU moves bytes: a plain copy, and the fastest rate at which a process has seen one."""

import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks import runner


def milliseconds(run: Callable[[], object]) -> float:
    """One run, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Copy:
    """A copy of 1 GiB.

    At times copies take up to a quarter longer, for seconds, and other kernels do not. A share of such a copy's rate
    would be too large: the fastest counts.
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

    def seen(self, times: Sequence[float]) -> dict[str, float]:
        """Take note of a row's copies, in milliseconds; the median's rate and the fastest one, read and written."""
        rate = 2 * self.source.numel() * self.source.element_size() / statistics.median(times)
        self.fastest = max(self.fastest, rate)
        return {"copy_terabytes_a_second": rate / 1e9, "fastest_terabytes_a_second": self.fastest / 1e9}

    def milliseconds(self, moved: int) -> float:
        """What moving so many bytes takes at the fastest rate."""
        return moved / self.fastest
