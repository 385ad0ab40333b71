"""How much memory a call really takes, from the allocator's own events.

A dispatch mode sees what operators return; it misses the scratch inside an operator and anything freed before
the operator ends. The allocator sees both, so `measure_memory` asks it, through torch's profiler, for every
block that was taken and given back, and builds from that the number of live bytes over time.

    live(t) = bytes of the blocks that were taken since the start and are not given back at t
    peak    = max over t of live(t)

What is not in it, on a CPU: blocks of other threads (the profiler's memory events are thread-local), memory
that no torch allocator hands out (Python objects, buffers inside a BLAS), and files that are mapped instead
of read, as safetensors does: their pages belong to the system's cache, so they are counted apart.

Elsewhere: what a load may take at most is law 5 of the design; the bound is tested in tests/reload.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

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
    """Live bytes over time while a call ran; they start at zero.

    Args:
        times_s: when the allocator took or gave back a block, in seconds from the start, ascending.
        live_bytes: live bytes right after each of those moments; same length.
        peak_bytes: the highest value of `live_bytes`, 0 if nothing was taken. On CUDA, the allocator's
            statistic.
        mapped_peak_bytes: the most bytes of files that were mapped at a time; not part of `live_bytes`.
        marks: the `record_function` blocks, in the order in which they began.
        result: what the call returned.
    """

    times_s: tuple[float, ...]
    live_bytes: tuple[int, ...]
    peak_bytes: int
    mapped_peak_bytes: int
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
        """Live bytes at `moment_s`, in seconds from the start."""
        live = 0
        for time_s, value in zip(self.times_s, self.live_bytes, strict=True):
            if time_s > moment_s:
                break
            live = value
        return live


def measure_memory(call: Callable[[], Any], *, device: torch.device | str = "cpu") -> MemoryTrace:
    """Run `call` and record every block that the allocator of `device` takes or gives back.

    Args:
        call: runs once, on the calling thread. What it raises passes through.
        device: whose allocator to watch: "cpu", or a CUDA device. There the peak comes from the allocator's
            statistics, which count the blocks of all threads; its high-water mark is reset.

    Returns:
        The trace. It holds the result of `call`, so drop it before the next measurement if that is large.

    A block that is given back by another thread counts as live until its address is used again. The
    profiler's own memory, some hundred bytes an operator, is not counted. The call can't be measured inside
    another profiler.
    """
    device = torch.device(device)
    base = _reset_peak(device)
    # Not torch.profiler.profile: that one warns, in torch 2.11, of what matters to repeated cycles only.
    profiler = profile(use_kineto=True, profile_memory=True)
    with profiler:
        # An event of our own is the zero of the clock: starting the profiler can take a second.
        with record_function(_START):
            pass
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    # The list of events lacks addresses; the tree has them, and torch's own memory profiler reads it too.
    results: Any = profiler.kineto_results
    events = list(_flat(results.experimental_event_tree()))
    start_ns = next(event.end_time_ns for event in events if event.name == _START)
    blocks, mappings = _live(events, device)
    peak = max((live for _, live in blocks), default=0)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - base
    return MemoryTrace(
        times_s=tuple((at_ns - start_ns) / 1e9 for at_ns, _ in blocks),
        live_bytes=tuple(live for _, live in blocks),
        peak_bytes=peak,
        mapped_peak_bytes=max((live for _, live in mappings), default=0),
        marks=_marks(events, start_ns),
        result=result,
    )


def _reset_peak(device: torch.device) -> int:
    """Bytes allocated now, the new high-water mark; 0 on a CPU, which keeps no such statistic."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _flat(tree: list[Any]) -> Iterator[Any]:
    """All events of a tree, in no particular order."""
    left = list(tree)
    while left:
        event = left.pop()
        left.extend(event.children)
        yield event


def _marks(events: list[Any], start_ns: int) -> tuple[Mark, ...]:
    spans = sorted(
        (event.start_time_ns, event.end_time_ns, event.name)
        for event in events
        if event.name != _START and str(getattr(event.extra_fields, "scope", "")).endswith("USER_SCOPE")
    )
    return tuple(Mark(name, (a - start_ns) / 1e9, (b - start_ns) / 1e9) for a, b, name in spans)


def _live(events: list[Any], device: torch.device) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(moment in ns, live bytes then) at each event of the allocator, and the same of mapped files."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    changes = []
    for event in events:
        fields = event.extra_fields
        where = getattr(fields, "device", None) if hasattr(fields, "alloc_size") else None
        if where is not None and where.type == device.type and (device.type == "cpu" or where.index == index):
            changes.append((event.start_time_ns, fields))
    changes.sort(key=lambda change: change[0])

    # By address, so that giving back what is older than the start does not count.
    held: tuple[dict[int, int], dict[int, int]] = ({}, {})
    lines: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    live = [0, 0]
    for at_ns, fields in changes:
        if fields.alloc_size > 0:
            # A CPU has no reserved memory; only torch's file mappings report some.
            kind = int(device.type == "cpu" and fields.total_reserved > 0)
            live[kind] += fields.alloc_size - held[kind].get(fields.ptr, 0)
            held[kind][fields.ptr] = fields.alloc_size
        elif fields.ptr in held[0] or fields.ptr in held[1]:
            kind = int(fields.ptr not in held[0])
            live[kind] -= held[kind].pop(fields.ptr)
        else:
            continue
        lines[kind].append((at_ns, live[kind]))
    return lines
