"""The second load of a name: what its loader did the first time, done again without the loader.

A loader that only copies slices of the fed tensor into slices of parameters does the same whenever a tensor of the same
shape and strides comes under the same name. Its copies are recorded while it runs, and become a plan when their session
commits. A later session checks the tensor's signature and repeats them: no loader, no dispatch mode, no work an
element. Whatever does more than views and copies (a cast, a sum, an index, values of another tensor) is not recorded
and runs its loader every time; so does a tensor of another signature.

    plan       signature and, for each copy, (parameter, box, where its source lies in the fed tensor, units)
    plan key   what else a loader looks at (an expert map that moved) is the caller's to say
    queue      with stable sources a replay only counts the arrival and queues it; `flush` writes the bytes
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from olq.reload.counter import active_counter
from olq.reload.cutting import Piece, cut
from olq.reload.ledger import storage_key
from olq.reload.progress import PlainParameter, Progress, Stored, note_lost
from olq.reload.quantized import QuantizedWeight
from olq.reload.region import Box, Masks, intersect, masks, whole
from olq.reload.trace import Trace

#: Attribute of a model that holds its `Plans`.
PLANS = "quant_plans"

#: Says what else than name, shard and tensor a loader of this name looks at.
PlanKey = Callable[[str], Hashable]
Key = str | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a plan.

    Args:
        label: the parameter.
        shape: of the parameter.
        box: its elements.
        product: `masks(box)`.
        view: (size, strides, offset) of the source relative to the fed tensor; None is all of it.
        pieces: how a quantized weight cuts it.
    """

    label: str
    shape: torch.Size
    box: Box
    product: Masks
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    pieces: tuple[Piece, ...]

    def source(self, tensor: Tensor) -> Tensor:
        """The copy's source in a fed tensor."""
        if self.view is None:
            return tensor
        size, strides, offset = self.view
        return tensor.as_strided(size, strides, tensor.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with a tensor of one name.

    Args:
        shape, strides, dtype: signature of the tensor.
        key: of the plan key's callback.
        copies: all that its loader did.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    key: Hashable
    copies: tuple[Copy, ...]

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the signature, and memory."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.strides
            and not tensor.is_meta
        )


class Plans:
    """The plans of one model, by (name, *shard). A copied or pickled model has none: it records its own."""

    def __init__(self) -> None:
        self.by_key: dict[Key, Plan] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plans":
        return Plans()

    def __reduce__(self) -> Any:
        return (Plans, ())


def forget_plans(model: nn.Module) -> None:
    """Let every loader run once more: after a change that loaders see and no plan key tells.

    Args:
        model: any; without plans nothing happens.
    """
    model.__dict__.pop(PLANS, None)


@dataclass(slots=True)
class _Queued:
    name: str
    tensor: Tensor
    copies: tuple[tuple[Progress, Copy], ...]


class Replay:
    """Plans at work in one session.

    Args:
        model: keeps the plans.
        progress: the session's parameters by name.
        stable: whether sources may wait until `flush`.
        plan_key: see `PlanKey`.
        enabled: False repeats nothing, and still records.
    """

    def __init__(
        self,
        model: nn.Module,
        progress: Mapping[str, Progress],
        *,
        stable: bool,
        plan_key: PlanKey | None,
        enabled: bool,
    ) -> None:
        self._model, self._progress = model, progress
        self._stable, self._plan_key = stable, plan_key
        self._plans: dict[Key, Plan] = model.__dict__.get(PLANS, Plans()).by_key if enabled else {}
        self._resolved: dict[Key, tuple[tuple[Progress, Copy], ...]] = {}
        self._new: dict[Key, Plan] = {}
        self._queue: deque[_Queued] = deque()
        #: Names that were replayed.
        self.count = 0

    def feed(self, name: str, tensor: Tensor, loader_args: tuple[Any, ...] = ()) -> bool:
        """Do with a tensor what was done the first time.

        Returns:
            False if there is no plan that fits; nothing has happened then.

        Raises:
            CoverageError: elements arrived twice.
            NonFiniteError: without stable sources, a value is inf or NaN and its method refuses that.
        """
        key = _key(name, loader_args)
        plan = self._plans.get(key)
        if plan is None or not plan.fits(tensor):
            return False
        if self._plan_key is not None and self._plan_key(name) != plan.key:
            return False
        copies = self._resolved.get(key)
        if copies is None:
            copies = self._resolve(key, plan)
        if not copies:
            return False
        claimed = 0
        try:
            for progress, copy in copies:
                progress.claim(copy.box, copy.product, name)
                claimed += 1
        except BaseException:
            for progress, copy in copies[:claimed]:
                progress.retract(copy.box)
            raise
        queued = _Queued(name, tensor, copies)
        self.count += 1
        if self._stable:
            self._queue.append(queued)
        else:
            with _Undisturbed():
                self._write(queued)
        return True

    def flush(self) -> None:
        """Write the bytes of everything that is queued.

        Raises:
            NonFiniteError: a value is inf or NaN and its method refuses that. Its tensor has left the queue and may be
                fed again; those behind it wait for the next flush.
        """
        with _Undisturbed():
            while self._queue:
                self._write(self._queue.popleft())

    def drop(self) -> None:
        """Forget what is queued."""
        self._queue.clear()

    def record(self, name: str, loader_args: tuple[Any, ...], tensor: Tensor, trace: Trace) -> None:
        """Make a plan of what a loader did with a tensor, if that can be repeated."""
        if trace.computed or not trace.arrivals:
            return
        copies: list[Copy] = []
        for progress, box, source in trace.arrivals:
            if source is None or progress.followers or storage_key(source) != storage_key(tensor):
                return
            if source.dtype != tensor.dtype:
                return
            if any(c.label == progress.label and all(map(intersect, c.box, box)) for c in copies):
                return  # a later copy won over an earlier one
            copies.append(_copy(progress, box, source, tensor))
        key = self._plan_key(name) if self._plan_key is not None else None
        plan = Plan(tensor.shape, tensor.stride(), tensor.dtype, key, tuple(copies))
        self._new[_key(name, loader_args)] = plan

    def commit(self) -> None:
        """Keep the plans of a session that went well."""
        if self._new:
            plans: Plans = self._model.__dict__.setdefault(PLANS, Plans())
            plans.by_key.update(self._new)

    def _resolve(self, key: Key, plan: Plan) -> tuple[tuple[Progress, Copy], ...]:
        """The plan's copies with this session's parameters; none if one of them is not part of it."""
        found = [(self._progress.get(copy.label), copy) for copy in plan.copies]
        fits = all(
            one is not None and not one.followers and one.parameter.shape == copy.shape for one, copy in found
        )
        resolved = tuple((cast("Progress", one), copy) for one, copy in found) if fits else ()
        self._resolved[key] = resolved
        return resolved

    def _write(self, queued: _Queued) -> None:
        stored: Stored = []
        try:
            for progress, copy in queued.copies:
                source = copy.source(queued.tensor)
                if isinstance(progress, QuantizedWeight):
                    progress.put(copy.pieces, source, queued.name, stored)
                elif isinstance(progress, PlainParameter):
                    progress.put(copy.box, source)
        except BaseException:
            for progress, copy in queued.copies:
                progress.retract(copy.box)
            note_lost(stored, queued.name)
            raise


class _Undisturbed:
    """No grad, and no counter that takes olq's own writes for a loader's. A generator would cost twice as much."""

    __slots__ = ("_grad", "_paused")

    def __enter__(self) -> None:
        counter = active_counter()
        self._paused = None if counter is None else counter.paused()
        if self._paused is not None:
            self._paused.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self._grad)
        if self._paused is not None:
            self._paused.__exit__(None, None, None)


def _copy(progress: Progress, box: Box, source: Tensor, tensor: Tensor) -> Copy:
    view = None
    if (
        source.shape != tensor.shape
        or source.stride() != tensor.stride()
        or source.data_ptr() != tensor.data_ptr()
    ):
        view = tuple(source.shape), source.stride(), int(source.storage_offset() - tensor.storage_offset())
    pieces = tuple(cut(progress.plan, box)) if isinstance(progress, QuantizedWeight) else ()
    return Copy(progress.label, progress.parameter.shape, box, masks(box), view, pieces)


def _key(name: str, loader_args: tuple[Any, ...]) -> Key:
    """What tells calls of loaders apart; 0 and False are two shards."""
    return (name, *loader_args, *map(type, loader_args)) if loader_args else name


def whole_trace(progress: Progress, tensor: Tensor) -> Trace:
    """The trace of a plain copy of the whole parameter."""
    trace = Trace()
    trace.arrivals.append((progress, whole(progress.parameter.shape), tensor))
    return trace
