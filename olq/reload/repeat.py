"""A reload that repeats an earlier one tensor by tensor: no layer is opened for it, and no account kept but what came.

If in one load all bytes of all quantized weights came by plans, these plans are a *routine*: each of them once is a
whole load again, without overlap. A session that begins on such a model, with stable sources on a GPU, leaves the
layers in kernel format, uncallable, and ticks plans off. The bytes go to the live kernel tensors with one launch for
many tensors. As soon as anything else comes (an unknown name, another shape, a second arrival, a question about the
state) the layers are opened and get the accounts that they would have had; from there on it is a load like any other.

    Routine   kept on a model, with its plans, from one commit to the next
    Repeat    one session's use of it
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import RLock
from typing import cast

import torch
from torch import Tensor, nn

from olq.errors import LoaderError
from olq.kernels import current_stream
from olq.kernels.batch import Batch, Job, job_of
from olq.methods.base import Call, QuantMethod, WeightPlan
from olq.methods.state import FORMAT_SUFFIX, LayerState
from olq.patterns import join
from olq.reload import quantized
from olq.reload.cutting import Piece
from olq.reload.plans import Copy, Plan, made_for, made_for_parameter
from olq.reload.quantized import QuantizedWeight
from olq.reload.stage import Meter
from olq.reload.tree import Tree

#: Tensors that wait for the first launch; each later one waits for half as many again, up to the second number. The GPU
#: begins early, is not done with one launch before the next one comes, and later launches are few.
_FIRST, _MOST = 16, 128


def _nothing() -> None:
    """No job."""


@dataclass(slots=True)
class _Write:
    """One piece of one copy of a plan.

    Args:
        copy: of the plan.
        piece: of the copy.
        job: gives all of it but the source's address, if that is there: its target keeps it.
        kernel: whether a kernel does it, as far as is known.
    """

    copy: Copy
    piece: Piece
    job: Callable[[], Job | None] = _nothing
    kernel: bool = True

    def source(self, tensor: Tensor) -> Tensor:
        """The piece's elements in a fed tensor."""
        whole = self.copy.source(tensor)
        return whole if self.piece.index is None else whole[self.piece.index]


@dataclass(slots=True)
class _Weight:
    """A weight of a routine.

    Args:
        made_for: as in `Copy`.
        shape: of its parameter.
        arrivals: copies that bring it.
        writes: all that these do.
        addresses: of the kernel tensors that jobs were made for.
    """

    made_for: object
    shape: torch.Size
    arrivals: int = 0
    writes: list[_Write] = field(default_factory=list)
    addresses: tuple[int, ...] = ()


class Routine:
    """Plans that together bring every quantized weight of a model, each element once."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.writes: dict[int, list[_Write]] = {}
        self.weights: dict[str, _Weight] = {}

    @classmethod
    def of(cls, plans: Iterable[Plan], weights: Iterable[QuantizedWeight]) -> "Routine | None":
        """The routine of a load that is complete.

        Args:
            plans: what came, each once; its elements did not overlap, since coverage refuses that.
            weights: all quantized weights of the model.

        Returns:
            None if a weight also came in another way, was staged, or brings others along.
        """
        routine, left = cls(), {one.label: one.coverage.total for one in weights}
        for one in weights:
            if one.followers or one.staged_elements:
                return None
            routine.weights[one.label] = _Weight(made_for(one), one.parameter.shape)
        for plan in plans:
            if not plan.copies or all(copy.label not in left for copy in plan.copies):
                continue
            routine.plans[id(plan)], writes = plan, []
            for copy in plan.copies:
                weight = routine.weights.get(copy.label)
                if weight is None or copy.shape != weight.shape or copy.made_for != weight.made_for:
                    return None
                left[copy.label] -= copy.elements
                weight.arrivals += 1
                found = [_Write(copy, piece) for piece in copy.pieces]
                weight.writes += found
                writes += found
            routine.writes[id(plan)] = writes
        return routine if routine.weights and not any(left.values()) else None


@dataclass(slots=True)
class Target:
    """A weight that repeats write. The layer's state keeps it from one to the next, and drops it when it moves.

    Args:
        routine: that it belongs to, and `weight`, what that knows of it.
        name: of the layer.
        layer, leaf: the layer, and the weight's name there.
        state: of the layer.
        method, plan: how it is stored.
        parameter: its load-format parameter, and `loader`, that one's loader.
        tensors: its live kernel tensors by suffix, and `named`, by their names in the layer.
        label: its full name.
        leaves: names of its kernel tensors and tag in the layer.
        jobs: that write it.
    """

    routine: "Routine"
    weight: _Weight
    name: str
    layer: nn.Module
    leaf: str
    state: LayerState
    method: QuantMethod
    plan: WeightPlan
    parameter: nn.Parameter
    loader: object
    tensors: Mapping[str, Tensor]
    named: tuple[tuple[str, Tensor], ...]
    label: str
    leaves: frozenset[str]
    jobs: list[Job] = field(default_factory=list)

    @classmethod
    def of(
        cls, routine: "Routine", name: str, layer: nn.Module, leaf: str, state: LayerState
    ) -> "Target | None":
        """The target for a weight, or None if the routine was made for something else."""
        label, plan, parameter = join(name, leaf), state.plans[leaf], state.load_parameters[leaf]
        method: QuantMethod = layer.__dict__["quant_method"]
        weight = routine.weights.get(label)
        if weight is None or parameter.shape != weight.shape or not method.judges_later:
            return None
        if made_for_parameter(plan, parameter) != weight.made_for:
            return None
        tensors = {suffix: cast("Tensor", layer._parameters[leaf + suffix]) for suffix in plan.tensors}
        weight.addresses = ()  # jobs of an older target are not for these tensors
        return cls(
            routine,
            weight,
            name,
            layer,
            leaf,
            state,
            method,
            plan,
            parameter,
            vars(parameter).get("weight_loader"),
            tensors,
            tuple((leaf + suffix, tensor) for suffix, tensor in tensors.items()),
            label,
            frozenset(leaf + suffix for suffix in (*plan.tensors, FORMAT_SUFFIX)),
        )

    def still(self, routine: "Routine", name: str, layer: nn.Module) -> bool:
        """Whether nothing has changed that it was made from."""
        state, leaf, mine = self.state, self.leaf, layer._parameters
        return (
            self.routine is routine
            and self.name == name
            and self.layer is layer
            and self.plan is state.plans[leaf]
            and self.parameter is state.load_parameters[leaf]
            and self.loader is self.parameter.__dict__.get("weight_loader")
            and self.method is layer.__dict__["quant_method"]
            and all(mine.get(key) is tensor for key, tensor in self.named)
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where its kernel tensors are now."""
        return tuple([tensor.data_ptr() for tensor in self.tensors.values()])

    def follow(self) -> None:
        """Drop jobs that were made for kernel tensors at other addresses."""
        addresses = self.addresses
        if addresses != self.weight.addresses:
            self.jobs.clear()
            for write in self.weight.writes:
                write.job, write.kernel = _nothing, True
            self.weight.addresses = addresses


class Repeat:
    """One session's repetition of a routine. Threads may share it.

    Args:
        routine: of the model.
        targets: every weight by name.
    """

    def __init__(self, routine: Routine, targets: dict[str, Target]) -> None:
        self._routine, self.targets = routine, targets
        self._seen: dict[int, str] = {}
        self._tried: set[int] = set()
        self._queue: list[tuple[list[_Write], Tensor]] = []
        self._together = _FIRST
        self._launched: dict[torch.cuda.Stream, None] = {}
        self._devices = list(
            {one.state.device for one in targets.values() if one.state.device.type == "cuda"}
        )
        self._streams_of_queue: list[int] = []
        self._objects: list[torch.cuda.Stream] = []
        self._stopped = False
        #: Held while anything is taken, written or handed over.
        self.lock = RLock()

    @classmethod
    def begin(cls, routine: Routine, tree: Tree) -> "Repeat | None":
        """A repeat, if the model is still what the routine was made for and can be written and judged later.

        Args:
            routine: of the model.
            tree: its modules.
        """
        targets: dict[str, Target] = {}
        if len(tree.named) != len(tree.modules):
            return None  # a module under two names may be fed under both
        for name, layer, state in tree.layers:
            if not state.installed or state.held or not quantized.waits(state.device):
                return None
            for leaf in state.plans:
                target: Target | None = state.made.get(leaf)
                if target is None or not target.still(routine, name, layer):
                    target = Target.of(routine, name, layer, leaf, state)
                    if target is None:
                        return None
                    state.made[leaf] = target
                targets[target.label] = target
        return cls(routine, targets) if len(targets) == len(routine.weights) else None

    @property
    def kernel(self) -> dict[nn.Module, frozenset[str]]:
        """Names of kernel tensors and their tags in each layer."""
        found: dict[nn.Module, frozenset[str]] = {}
        for one in self.targets.values():
            found[one.layer] = found[one.layer] | one.leaves if one.layer in found else one.leaves
        return found

    @property
    def complete(self) -> bool:
        """Whether every plan has come."""
        return len(self._seen) == len(self._routine.writes)

    @property
    def touched(self) -> tuple[str, ...]:
        """Weights that something has come for."""
        plans = self._routine.plans
        labels = {copy.label for key in (*self._seen, *self._tried) for copy in plans[key].copies}
        return tuple(label for label in self.targets if label in labels)

    def take(self, plan: Plan, name: str, tensor: Tensor) -> bool:
        """Do with a tensor what the plan says, now or at the next launch.

        Args:
            plan: fits the tensor.
            name: what it is called.
            tensor: the source, unchanged until the next `launch`.

        Returns:
            False if the plan is not of the routine or has come before, or if the repeat is over.

        Raises:
            Exception: of a launch. What waited goes on waiting, but for this tensor, which may be fed again.
        """
        key = id(plan)
        writes = self._routine.writes.get(key)
        if writes is None:
            return False
        with self.lock:
            if self._stopped or key in self._seen:
                return False
            streams = self._current()
            if (
                self._queue and streams != self._streams_of_queue
            ):  # what waits is ready on its own stream, not on this
                self._write_there()
            if not self._queue:
                self._streams_of_queue = streams
                self._objects = [torch.cuda.current_stream(device) for device in self._devices]
            self._seen[key] = name
            self._queue.append((writes, tensor))
            if len(self._queue) >= self._together:
                self._together = min(self._together * 3 // 2, _MOST)
                try:
                    self._write()
                except BaseException:
                    self._queue.pop()
                    del self._seen[key]
                    self._tried.add(key)
                    raise
        return True

    def launch(self) -> None:
        """Write all that waits: it has been enqueued on the current stream when this returns."""
        with self.lock:
            self._write_there()
            for stream in self._launched:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            self._launched.clear()

    def stop(self) -> None:
        """Take nothing more. What has come has been written when this returns, as after `launch`."""
        with self.lock:
            self._stopped = True
            self.launch()

    def drop(self) -> None:
        """Take nothing more, and forget what waits."""
        with self.lock:
            self._stopped = True
            self._queue.clear()

    def hand_over(self, weights: Mapping[str, QuantizedWeight]) -> None:
        """Give weights the accounts of what has come.

        Args:
            weights: by name, of layers that have been opened.
        """
        for key, name in self._seen.items():
            for copy in self._routine.plans[key].copies:
                weights[copy.label].take_over(copy.box, copy.product, copy.elements, name)

    def account(self, label: str) -> QuantizedWeight:
        """An account of a weight for who asks when all is over; nothing is written through it."""
        one = self.targets[label]
        device, meter = one.state.device, Meter()
        return QuantizedWeight(
            label, one.parameter, one.method, one.plan, device=device, tensors=one.tensors, meter=meter
        )

    def finite(self) -> bool:
        """Whether all weights are usable: one wait for the GPU."""
        groups: dict[tuple[QuantMethod, torch.device], list[Mapping[str, Tensor]]] = {}
        for one in self.targets.values():
            groups.setdefault((one.method, one.state.device), []).append(one.tensors)
        answers = [method.finite(tensors).all() for (method, _), tensors in groups.items()]
        return all(map(bool, answers))

    def check(self) -> None:
        """Raise `LoaderError` if somebody replaced a kernel tensor meanwhile."""
        for one in self.targets.values():
            for key, tensor in one.named:
                if one.layer._parameters.get(key) is not tensor:
                    raise LoaderError(
                        "A kernel tensor was replaced while its load was open.",
                        where=join(one.name, key),
                        found="another object in its place, which this load has not written",
                        need="the parameter that was there when the load began",
                        remedy="replace parameters before a load begins, or after its commit",
                    )

    def commit(self) -> None:
        """Let the layers be called again, one generation on."""
        for state in {id(one.state): one.state for one in self.targets.values()}.values():
            state.generation, state.held, state.owner = state.generation + 1, "", None

    def _write(self) -> None:
        if not self._queue:
            return
        batch = Batch()
        queue, self._queue = self._queue, []
        try:
            with torch.no_grad():
                for writes, tensor in queue:
                    for write in writes:
                        self._add(batch, write, tensor)
                batch.launch()
        except BaseException:
            self._queue = queue  # writing again what was written does no harm
            raise
        self._launched.update(dict.fromkeys(self._objects))

    def _write_there(self) -> None:
        """Write on the streams that were current when the tensors came."""
        with ExitStack() as stack:
            if self._queue and self._streams_of_queue != self._current():
                for stream in self._objects:
                    stack.enter_context(torch.cuda.stream(stream))
            self._write()

    def _current(self) -> list[int]:
        """The current stream of each device."""
        return [current_stream(device) for device in self._devices]

    def _add(self, batch: Batch, write: _Write, tensor: Tensor) -> None:
        target = self.targets[write.copy.label]
        target.follow()  # a model may be moved between two feeds
        source = write.source(tensor)
        job = write.job()
        plain = (
            type(source) is Tensor or type(source) is nn.Parameter
        )  # others may have no memory of their own
        if plain and job is not None and batch.add(job, source):
            return
        if plain and write.kernel:  # never done, or with a source of another alignment or device
            calls = _calls(target, write.piece, source)
            job = job_of(calls) if calls else None
            write.kernel = job is not None
            if job is not None:
                target.jobs.append(job)
                write.job = weakref.ref(job)
                if batch.add(job, source):
                    return
        target.method.write_(source, target.tensors, target.plan, write.piece.target)


def _calls(target: Target, piece: Piece, source: Tensor) -> Sequence[Call] | None:
    """The calls that write a piece, if the method's `write_` is no more than these."""
    if type(target.method).write_ is not QuantMethod.write_:
        return None
    return target.method.calls(source, target.tensors, target.plan, piece.target)
