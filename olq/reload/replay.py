"""The second load of a name: what its loader did the first time, done again without the loader.

What a loader copies is recorded while it runs (`olq.reload.plans`), and becomes a plan when the session commits. A
later session checks the tensor's signature and repeats it: no loader, no dispatch mode, no work an element. What has no
plan runs its loader every time; so does a tensor of another signature. With stable sources a replay only counts the
arrival and queues it; `flush` writes the bytes.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from olq.errors import CoverageError
from olq.reload import quantized
from olq.reload.counter import active_counter
from olq.reload.names import Names
from olq.reload.plans import PLANS, Copy, Key, Plan, PlanKey, Plans, copies_of, key_of
from olq.reload.progress import PlainParameter, Progress, Stored, note_lost
from olq.reload.quantized import QuantizedWeight
from olq.reload.routine import Routine
from olq.reload.trace import Trace


@dataclass(slots=True)
class _Queued:
    name: str
    tensor: Tensor
    copies: tuple[tuple[Progress, Copy], ...]


class Replay:
    """Plans at work in one session.

    Args:
        model: keeps the plans.
        names: the session's parameters.
        stable: whether sources may wait until `flush`.
        plan_key: see `PlanKey`.
        enabled: False repeats nothing, and still records.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        *,
        stable: bool,
        plan_key: PlanKey | None,
        enabled: bool,
    ) -> None:
        self._model, self._names = model, names
        self._stable, self._plan_key = stable, plan_key
        self._plans: dict[Key, Plan] = model.__dict__.get(PLANS, Plans()).by_key if enabled else {}
        self._resolved: dict[int, tuple[tuple[Progress, Copy], ...]] = {}
        self._used: dict[int, Plan] = {}
        self._new: dict[Key, Plan] = {}
        self._silent: dict[Key, Plan] = {}
        self._all_recorded, self._loop_only = True, None
        self._queue: deque[_Queued] = deque()
        #: Names that were replayed.
        self.count = 0

    def plan(self, name: str, tensor: Tensor, loader_args: tuple[Any, ...] = ()) -> Plan | None:
        """What was done with such a tensor the first time, if what its loader looked at is as it was.

        Without copies it is of a name for which the model's load_weights wrote nothing, in a load that it only made
        copies in.
        """
        if not self._plans:
            return None
        key = key_of(name, loader_args) if loader_args else name
        plan = self._plans.get(key) if key is not None else None
        if plan is None or not plan.fits(tensor) or plan.key != self._looked_at(name):
            return None
        return plan

    def feed(self, plan: Plan, name: str, tensor: Tensor) -> bool:
        """Do with a tensor what was done the first time.

        Args:
            plan: of this name, that fits the tensor.
            name: what it is called.
            tensor: the source.

        Returns:
            False if the plan is of another model, or if its elements have arrived: its loader has to say what that
            means. Nothing has happened then.

        Raises:
            NonFiniteError: without stable sources, a value is inf or NaN and its method refuses that.
        """
        repeat = self._names.repeat
        if repeat is not None and repeat.take(plan, name, tensor):
            self.count += 1
            self._used[id(plan)] = plan
            return True
        copies = self._resolved.get(id(plan))
        if copies is None:
            copies = self._resolve(plan)
        if not copies:
            return False
        claimed = 0
        try:
            for progress, copy in copies:
                progress.claim(copy.box, copy.product, copy.elements, name)
                claimed += 1
        except CoverageError:
            for progress, copy in copies[:claimed]:
                progress.settle(copy.elements)
                progress.retract(copy.box)
            return False
        queued = _Queued(name, tensor, copies)
        # A loader may read or transform what has memory: only what nobody sees before the commit can wait.
        if self._stable and not any(isinstance(progress, PlainParameter) for progress, _ in copies):
            self._queue.append(queued)
        elif tensor.requires_grad or active_counter() is not None:
            with _Undisturbed():
                self._write(queued)
        else:  # nothing here has a gradient, and nobody watches
            self._write(queued)
        self._used[id(plan)] = plan
        return True

    @property
    def loop_only(self) -> bool:
        """Whether the model's load_weights need not be called if no tensor is left for it."""
        plans = self._model.__dict__.get(PLANS)
        return bool(self._plans) and plans is not None and plans.loop_only

    def note_around(self, trace: Trace) -> None:
        """Tell what a load_weights did before its first item and after its last."""
        idle = not trace.computed and not trace.arrivals
        self._loop_only = idle if self._loop_only is None else self._loop_only and idle

    def _looked_at(self, name: str) -> Hashable:
        return self._plan_key(name) if self._plan_key is not None else None

    def flush(self) -> None:
        """Write the bytes of everything that is queued.

        Raises:
            NonFiniteError: a value is inf or NaN and its method refuses that. Its tensor has left the queue and may be
                fed again; those behind it wait for the next flush. On a GPU the commit looks: see `judge`.
        """
        if (repeat := self._names.repeat) is not None:
            repeat.launch()
        with _Undisturbed():
            while (queued := self._next()) is not None:
                self._write(queued)

    def _next(self) -> _Queued | None:
        try:
            return self._queue.popleft()
        except IndexError:  # another thread may have taken the last one
            return None

    def drop(self) -> None:
        """Forget what is queued."""
        self._queue.clear()

    def record(self, name: str, loader_args: tuple[Any, ...], tensor: Tensor, trace: Trace) -> None:
        """Make a plan of what a loader did with a tensor, if that can be repeated."""
        shard = key_of(name, loader_args)
        copies = copies_of(trace, tensor)
        if copies is None or shard is None:
            self._all_recorded = False
            return
        plan = Plan(tensor.shape, tensor.stride(), tensor.dtype, self._looked_at(name), copies)
        (self._new if copies else self._silent)[shard] = plan
        self._used[id(plan)] = plan

    def commit(self, *, whole: bool) -> None:
        """Keep the plans of a session that went well.

        Args:
            whole: it was a load of everything, and no shadow.

        Names for which nothing was written are known as ignored only if everything else was copied from its own tensor:
        otherwise the loader may have kept theirs for another name.
        """
        new = {**self._silent, **self._new} if self._all_recorded and self._loop_only else self._new
        if new or self._loop_only is not None:
            plans: Plans = self._model.__dict__.setdefault(PLANS, Plans())
            plans.by_key.update(new)
            if self._loop_only is not None:
                plans.loop_only = self._loop_only
        if whole and self._names.repeat is None and PLANS in self._model.__dict__:
            self._keep_routine(self._model.__dict__[PLANS])

    def _keep_routine(self, plans: Plans) -> None:
        """Note whether the plans of this session can be repeated, where that is of use: where a GPU would wait."""
        weights = self._names.weights
        if plans.routine is not None and plans.routine.came_with(self._used, weights):
            return
        plans.routine = None
        if any(quantized.waits(one.device) for one in weights):
            plans.routine = Routine.of(self._used.values(), weights)

    def _resolve(self, plan: Plan) -> tuple[tuple[Progress, Copy], ...]:
        """The plan's copies with this session's parameters; none if one of them is not part of it."""
        found = [(self._names.find(copy.label), copy) for copy in plan.copies]
        fits = all(copy.fits(one) for one, copy in found)
        resolved = tuple((cast("Progress", one), copy) for one, copy in found) if fits else ()
        self._resolved[id(plan)] = resolved
        return resolved

    def _write(self, queued: _Queued) -> None:
        stored: Stored = []
        try:
            for progress, copy in queued.copies:
                source = copy.source(queued.tensor)
                if isinstance(progress, QuantizedWeight):
                    progress.put(copy.pieces, source, queued.name, stored, later=self._stable)
                elif isinstance(progress, PlainParameter):
                    progress.put(copy.box, source)
        except BaseException:
            for progress, copy in queued.copies:
                progress.retract(copy.box)
            note_lost(stored, queued.name)
            raise
        finally:
            for progress, copy in queued.copies:
                progress.settle(copy.elements)
        self.count += 1


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
