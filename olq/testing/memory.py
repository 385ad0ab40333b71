"""How much memory a call really takes, from the allocator's own events.

A dispatch mode sees what operators return; it misses the scratch inside an operator and anything freed before
the operator ends. The allocator sees both, so `measure_memory` asks it, through `torch.profiler`, for every
block that was taken and given back, and builds from that the number of live bytes over time.

    live(t) = bytes taken since the start - bytes given back since the start        peak = max over t of
    live(t)

What is not seen, on a CPU: the blocks of other threads (the profiler's memory events are thread-local), file
pages that safetensors maps instead of allocating, and memory that no torch allocator hands out (Python
objects, buffers inside a BLAS). Giving back a block that is older than the measurement is no event on a CPU,
so `live` can be too high by such blocks, never too low.

Elsewhere: what a load should take at most is law 5 of the design; the bound is tested in tests/reload.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = "[memory]"
_START = "olq.testing.memory: start"


@dataclass(frozen=True)
class Mark:
    """A `torch.profiler.record_function` block that ran during a measurement.

    Args:
        name: the name given to `record_function`.
        start_s: when it began, in seconds from the start of the measurement.
        end_s: when it ended.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class MemoryTrace:
    """Live bytes over time while a call ran; a new `MemoryTrace` starts at zero.

    Args:
        times_s: when the allocator took or gave back a block, in seconds from the start, ascending.
        live_bytes: live bytes above the start, right after each of those moments; same length.
        peak_bytes: the highest value of `live_bytes`, 0 if nothing was taken. On CUDA the allocator's own
            statistic.
        marks: the `record_function` blocks, in the order in which they began.
        result: what the call returned.
    """

    times_s: tuple[float, ...]
    live_bytes: tuple[int, ...]
    peak_bytes: int
    marks: tuple[Mark, ...]
    result: Any

    @property
    def final_bytes(self) -> int:
        """Bytes still live when the call returned, its result included."""
        return self.live_bytes[-1] if self.live_bytes else 0

    @property
    def peak_s(self) -> float:
        """When `live_bytes` was highest for the first time, in seconds from the start; 0.0 without events."""
        if not self.live_bytes:
            return 0.0
        return self.times_s[self.live_bytes.index(max(self.live_bytes))]

    def live_at(self, moment_s: float) -> int:
        """Live bytes above the start at `moment_s`, in seconds from the start."""
        live = 0
        for time, value in zip(self.times_s, self.live_bytes, strict=True):
            if time > moment_s:
                break
            live = value
        return live


def measure_memory(call: Callable[[], Any], *, device: torch.device | str = "cpu") -> MemoryTrace:
    """Run `call` and record every block that the allocator of `device` takes or gives back.

    Args:
        call: runs once, on the calling thread. What it raises passes through.
        device: whose allocator to watch: "cpu", or a CUDA device, whose peak comes from the statistics
            (it counts the blocks of all threads; its high-water mark is reset).

    Returns:
        The trace. It holds the result of `call`, so drop it before the next measurement if that is large.

    The profiler keeps about 200 bytes an operator in memory of its own, which are not counted. It can't be
    nested in another profiler.
    """
    device = torch.device(device)
    gc.collect()  # otherwise garbage of earlier work could be given back, and counted, during the call
    base = _reset_peak(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # An event of our own is the zero of the clock: starting the profiler can take a second.
        with torch.profiler.record_function(_START):
            pass
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    start_ns, marks, changes = _read(profiler, device)
    times, live, now = [], [], 0
    for at_ns, size in changes:
        now += size
        times.append((at_ns - start_ns) / 1e9)
        live.append(now)
    peak = max(live, default=0)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - base
    return MemoryTrace(tuple(times), tuple(live), max(peak, 0), marks, result)


def _reset_peak(device: torch.device) -> int:
    """Bytes allocated now, the new high-water mark; 0 on a CPU, which keeps no such statistic."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _read(profiler: Any, device: torch.device) -> tuple[int, tuple[Mark, ...], list[tuple[int, int]]]:
    """Start of the clock in ns, the marks, and (moment in ns, bytes) of each allocator event, by time."""
    start_ns = 0
    spans: list[tuple[int, int, str]] = []
    changes: list[tuple[int, int]] = []
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    for event in profiler.profiler.kineto_results.events():
        if event.name() == _START:
            start_ns = event.end_ns()
        elif event.name() == _MEMORY_EVENT:
            # A CPU has one allocator whatever index its events carry (-1 on the versions seen).
            if event.device_type().name == device.type.upper() and (
                device.type == "cpu" or event.device_index() == index
            ):
                changes.append((event.start_ns(), event.nbytes()))
        elif event.is_user_annotation():
            spans.append((event.start_ns(), event.end_ns(), event.name()))
    marks = [Mark(name, (a - start_ns) / 1e9, (b - start_ns) / 1e9) for a, b, name in sorted(spans)]
    return start_ns, tuple(marks), sorted(changes, key=lambda change: change[0])
