"""Many jobs, few launches: jobs that differ in addresses only share a launch, which finds its tensors in a table.

One launch costs the CPU as much as quantizing a small tensor costs the GPU; a reload has hundreds of tensors or tens of
thousands, and most have the same shape, strides and dtype as many others. Importing this loads no triton.

job    what is done with one source: an operator's call, or several in order (nvfp4: tensor scale, then codes)
group  jobs of equal signature. One object for all of them, found by identity when a job is added (olq.kernels.tabled)

A launch of many jobs does to each what its single launches do, byte for byte: tiles, arithmetic and their order are
those of the same plan. They never take `Plan.together`.
"""

from array import array
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from olq.errors import LayoutError, StateError
from olq.kernels import launching, plans
from olq.kernels.shapes import Plan
from olq.kernels.tabled import OPERATORS, Group, launch_together, low_bits

Calls = Sequence[tuple[str, tuple[Any, ...]]]
"""Operators' names in `torch.ops.olq` and their arguments; the first of each is the source."""

_GROUPS: WeakValueDictionary[tuple[object, ...], Group] = WeakValueDictionary()
"""By signature; a group lives as long as one of its jobs."""


class Job:
    """All of one job but its source's address. Made by `job_of`; may be added to any number of batches.

    It keeps the memory of its results alive, not that of the source it was made with.
    """

    __slots__ = ("__weakref__", "calls", "group", "others")

    def __init__(self, calls: Calls, group: Group) -> None:
        self.group = group
        #: Calls without their first argument, the source.
        self.calls = tuple((operator, args[1:]) for operator, args in calls)
        #: Addresses of the tensors in `calls`, in their order.
        self.others = array(
            "q", [a.data_ptr() for _, args in calls for a in args[1:] if isinstance(a, Tensor)]
        )

    def run(self, source: Tensor) -> None:
        """The job by single launches."""
        for operator, rest in self.calls:
            args = (source, *rest)
            if not (launching.replay(operator, args) or launching.launch(operator, args)):
                raise StateError(
                    "A job that had kernels has none now.",
                    where=f"torch.ops.olq.{operator}, in a batch",
                    found=str(launching.unavailable(args) or plans.plan(operator, args)),
                    need="a source of the shape, strides, dtype and device that the job was made for",
                    remedy="make the job anew (olq.kernels.batch.job_of) where a source's signature changes",
                )


def job_of(calls: Calls) -> Job | None:
    """Prepare calls for batches, or None if there are none, or one has no kernel that reads a table: make these as
    they are.

    Args:
        calls: have passed the operators' checks, and read one source. `QuantMethod.calls` returns such calls.

    Raises:
        LayoutError: the calls read different sources.
    """
    if not calls:
        return None
    source = calls[0][1][0]
    for operator, args in calls:
        if args[0] is not source:
            raise LayoutError(
                "Calls of one job read one source.",
                where=f"torch.ops.olq.{operator}, in a batch",
                found="another tensor than in the call before it",
                need="the same tensor as the first argument of each call",
                remedy="make one job for each source",
            )
    if any(operator not in OPERATORS for operator, _ in calls):
        return None
    key = _signature(calls)
    group = _GROUPS.get(key)
    if group is None:
        found = []
        for operator, args in calls:
            plan = None if launching.unavailable(args) else plans.plan(operator, args)
            if not isinstance(plan, Plan):
                return None
            found.append(plan)
        group = _GROUPS[key] = Group(calls, found)
    return Job(calls, group)


class Batch:
    """Jobs that wait to be launched together, for one thread and, on each device, its current stream.

    Jobs of a batch run in no order and at the same time: no one's result may overlap another's result or source.
    """

    def __init__(self) -> None:
        self._waiting: dict[Group, _Waiting] = {}

    def __len__(self) -> int:
        """Jobs that wait."""
        return sum(len(waiting.entries) for waiting in self._waiting.values())

    def add(self, job: Job, source: Tensor) -> bool:
        """Let a job wait for `launch`, and keep its source alive until then.

        Args:
            job: from `job_of`.
            source: in place of the source that the job was made with. Shape, strides and dtype have to be the same: the
                caller has checked them. Its values are read after `launch`, in the stream's order.

        Returns:
            False, and nothing was added, if the source is on another device, or not 16-byte aligned where the one
            before was: that is a job of its own.
        """
        pointer = source.data_ptr()
        group = job.group
        if pointer & group.low or source.get_device() != group.index:
            return False
        waiting = self._waiting.get(group)
        if waiting is None:
            waiting = self._waiting[group] = _Waiting()
        waiting.words.append(pointer)
        waiting.words.extend(job.others)
        waiting.entries.append((job, source))
        return True

    def launch(self) -> None:
        """Launch all that waits and keep nothing of it, also after an error. Does not wait for the GPU.

        A group of one job is launched singly, and so is everything while a CUDA graph is captured: the graph would
        repeat the copy of a table that is gone. Until the launches are done they need, on the device, 32 bytes for each
        job and launch of its plan, and the scratch of as many jobs as one launch takes (`olq.kernels.tabled.CACHE`).
        """
        waiting, self._waiting = self._waiting, {}
        devices: dict[torch.device, dict[Group, _Waiting]] = {}
        for group, jobs in waiting.items():
            devices.setdefault(group.device, {})[group] = jobs
        for device, groups in devices.items():
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    _launch(device, groups)
            else:
                _launch(device, groups)


class _Waiting:
    """Jobs of one group; and their addresses, the source's first, `width` a job."""

    __slots__ = ("entries", "words")

    def __init__(self) -> None:
        self.entries: list[tuple[Job, Tensor]] = []
        self.words = array("q")


def _signature(calls: Calls) -> tuple[object, ...]:
    """All that a group depends on."""
    matrices = calls[0][1][0].shape[:-2].numel()
    key: list[object] = []
    for operator, args in calls:
        key.append(operator)
        for a in args:
            if isinstance(a, Tensor):
                key += (a.device, a.dtype, a.shape, a.stride(), low_bits(a, matrices))
            else:
                key.append(a)
    return tuple(key)


def _launch(device: torch.device, groups: dict[Group, _Waiting]) -> None:
    """Launch on the current stream of `device`, which is the current one."""
    singly = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    together = {}
    for group, waiting in groups.items():
        if singly or len(waiting.entries) == 1:
            for job, source in waiting.entries:
                job.run(source)
        else:
            together[group] = waiting.words
    if together:
        launch_together(device, together)
