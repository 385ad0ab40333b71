"""A reload that repeats an earlier one tensor by tensor: no layer is opened for it, and no account kept but what came.

A session that begins on a model with a routine, with stable sources on a GPU, leaves the layers in kernel format,
uncallable, and ticks plans off. The bytes go to the live kernel tensors with one launch for many tensors. As soon as
anything else comes (an unknown name, another shape, a second arrival, a question about the state) the layers are opened
and get the accounts that they would have had; from there on it is a load like any other.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from threading import RLock

import torch
from torch import Tensor, nn

from olq.errors import LoaderError
from olq.kernels import current_stream
from olq.kernels.batch import Batch
from olq.patterns import join
from olq.reload import quantized
from olq.reload.plans import Plan
from olq.reload.quantized import QuantizedWeight
from olq.reload.routine import Routine, Target, Write
from olq.reload.stage import Meter
from olq.reload.tree import Tree

#: Tensors that wait for the first launch; each later one waits for half as many again, up to the second number. The GPU
#: begins early (a Llama layer has seven), is not done with one launch before the next comes, and later ones are few.
_FIRST, _MOST = 8, 128


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
        self._queue: list[tuple[list[Write], Tensor]] = []
        self._together = _FIRST
        self._launched: dict[torch.cuda.Stream, None] = {}
        devices = {one.state.device for one in targets.values()}
        self._devices = [device for device in devices if device.type == "cuda"]
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
        judged_later: dict[torch.device, bool] = {}
        for name, layer, state in tree.layers:
            device = state.device
            if device not in judged_later:
                judged_later[device] = quantized.waits(device)
            if not state.installed or state.held or not judged_later[device]:
                return None
            made = state.made
            for leaf in state.plans:
                target: Target | None = made.get(leaf)
                if target is None or not target.still(routine, name, layer):
                    target = Target.of(routine, name, layer, leaf, state)
                    if target is None:
                        return None
                    made[leaf] = target
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
            # What waits is ready on its own stream, not on this.
            if self._queue and streams != self._streams_of_queue:
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
        return all(
            quantized.finite([(one.method, one.state.device, one.tensors) for one in self.targets.values()])
        )

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
            followed: set[str] = set()
            with torch.no_grad():
                for writes, tensor in queue:
                    for write in writes:
                        label = write.copy.label
                        target = self.targets[label]
                        if label not in followed:  # a model may be moved between two feeds
                            target.follow()
                            followed.add(label)
                        target.add(batch, write, tensor)
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
