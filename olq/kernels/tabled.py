"""Launches of many jobs: the table of their addresses, and how one launch reads it. See olq.kernels.batch.

table  int64 [jobs, WORDS] for each launch of a group's plans: the addresses of its operands, a row for each job.
       olq.kernels.memory says how a kernel reads it
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from olq.kernels import launching, tiles
from olq.kernels.shapes import GRID, SCRATCH, WORDS, Launch, Plan

OPERATORS = frozenset({"quantize_fp8_", "quantize_mxfp8_", "nvfp4_tensor_scale_", "quantize_nvfp4_"})
"""Operators whose kernels read a table."""

CACHE = tiles.CACHE
"""Bytes of sources between two launches that both read them: the second finds in the cache what the first has read."""

LARGE = 16
"""Jobs between two launches whose sources do not fit there anyway: what follows the first is a tiny launch, whose
latency they share. Each needs a few KB of scratch."""


class Stage:
    """One launch of a group.

    Args:
        launch: for one job.
        columns: where its operands are among a job's addresses.
        dtypes: of its operands.
        aligned: bit i: operand i of every job is 16-byte aligned.
    """

    __slots__ = ("again", "aligned", "columns", "dtypes", "launch")

    def __init__(
        self, launch: Launch, columns: tuple[int, ...], dtypes: tuple[torch.dtype, ...], aligned: int
    ) -> None:
        self.launch, self.columns, self.dtypes, self.aligned = launch, columns, dtypes, aligned
        self.again: launching._Ready | None = None

    def rows(self, words: array, width: int, slots: array) -> array:
        """This launch's part of the table, from all addresses of the jobs and those of their scratch."""
        count = len(words) // width
        rows = array("q", bytes(8 * WORDS * count))
        for place, column in enumerate(self.columns):
            rows[place::WORDS] = slots if column == SCRATCH else words[column::width]
        return rows

    def run(self, table: Tensor, at: int, count: int, stream: int | None) -> None:
        """Launch for `count` jobs, whose rows start at word `at` of the table."""
        x, y, z = self.launch.grid
        if self.again is not None:
            ready, pointer = self.again, table.data_ptr() + 8 * at
            # The first operands are only there for their types; the last two constants go by unread.
            operands = [pointer] * len(self.columns)
            tail = ready.tail[:-3]
            ready.run(x, y, z * count, stream, *ready.before[1], *operands, *tail, pointer, None, None)
            return
        rows = table[at:]
        kernel = launching._kernel(self.launch.kernel)[(x, y, z * count)](
            *(rows.view(dtype) for dtype in self.dtypes),
            *self.launch.numbers,
            table=rows,
            TABLE=z,
            ALIGNED=self.aligned,
            **launching.settings(self.launch, table.device),
        )
        if table.is_cuda and launching._known():
            self.again = launching._Ready(kernel, self.launch)


class Group:
    """What equal jobs share.

    Args:
        calls: of one of them.
        found: their plans.
    """

    __slots__ = ("__weakref__", "device", "index", "low", "scratch", "size", "stages", "width")

    def __init__(self, calls: Sequence[tuple[str, tuple[Any, ...]]], found: Sequence[Plan]) -> None:
        source: Tensor = calls[0][1][0]
        matrices = source.shape[:-2].numel()
        self.device, self.index, self.low = source.device, source.get_device(), low_bits(source, matrices)
        self.size = source.numel() * source.element_size()
        # Float32 of scratch for a job; slices start on 16 bytes. Calls follow one another and may use the same.
        self.scratch = -(-max(plan.scratch for plan in found) // 4) * 4
        self.stages: list[Stage] = []
        self.width = 1
        for (_, args), plan in zip(calls, found, strict=True):
            tensors = [a for a in args if isinstance(a, Tensor)]
            places = [0, *range(self.width, self.width + len(tensors) - 1)]
            self.width += len(tensors) - 1
            for one in plan.launches:
                columns = tuple(SCRATCH if i == SCRATCH else places[i] for i in one.operands)
                dtypes = tuple(torch.float32 if i == SCRATCH else tensors[i].dtype for i in one.operands)
                lows = [15 if i == SCRATCH else low_bits(tensors[i], matrices) for i in one.operands]
                aligned = sum(1 << place for place, low in enumerate(lows) if low)
                self.stages.append(Stage(one, columns, dtypes, aligned))

    def limit(self) -> int:
        """Jobs that one launch takes."""
        limit = GRID // max(stage.launch.grid[2] for stage in self.stages)
        if len(self.stages) > 1:
            limit = min(limit, CACHE // self.size if 2 * self.size <= CACHE else LARGE)
        return max(limit, 1)

    def room(self, limit: int, count: int) -> tuple[Tensor | None, array]:
        """Scratch for `limit` jobs at a time, and the address of each of `count` jobs' slice of it."""
        if not self.scratch:
            return None, array("q")
        scratch = torch.empty(limit * self.scratch, dtype=torch.float32, device=self.device)
        first, step = scratch.data_ptr(), 4 * self.scratch
        slots = array("q", range(first, first + step * limit, step))
        return scratch, (slots * -(-count // limit))[:count]


def low_bits(t: Tensor, matrices: int) -> int:
    """Bits that are 0 in each address of a group: 15 where kernels may rely on alignment, else 0.

    A single number a matrix may be anywhere: parts of a fused layer have theirs next to each other.
    """
    return 15 if t.numel() > matrices and not t.data_ptr() & 15 else 0


def launch_together(device: torch.device, groups: Mapping[Group, array]) -> None:
    """Launch on the current stream of `device`, which is the current one.

    Args:
        device: of all that is in `groups`.
        groups: addresses of the jobs of each: the source's first, then those of the other tensors; `group.width` a job.
    """
    words = array("q")
    runs = []
    for group, addresses in groups.items():
        count = len(addresses) // group.width
        limit = min(group.limit(), count)
        scratch, slots = group.room(limit, count)
        starts = []
        for stage in group.stages:
            starts.append(len(words))
            words += stage.rows(addresses, group.width, slots)
        runs.append((group, count, limit, starts, scratch))
    table = _upload(words, device)
    stream = launching._stream_of()(device.index) if device.type == "cuda" else None
    for group, count, limit, starts, _ in runs:
        for first in range(0, count, limit):
            for stage, start in zip(group.stages, starts, strict=True):
                stage.run(table, start + WORDS * first, min(limit, count - first), stream)


def _upload(words: array, device: torch.device) -> Tensor:
    """The table on a device, made and freed in the order of its current stream.

    A copy from page-locked memory is only enqueued, whatever its size; PyTorch keeps such memory until it is done.
    """
    table = torch.frombuffer(words, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
