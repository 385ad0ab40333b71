"""What a reload that repeats an earlier one knows beforehand: which plans, which weights, which kernel calls.

If in one load all bytes of all quantized weights came by plans, these plans are a *routine*: each of them once is a
whole load again, without overlap. `olq.reload.repeat` makes use of it.

    Routine   kept on a model, with its plans, from one commit to the next
    Target    a weight that it writes; the layer's state keeps it
    Write     one piece of one copy of a plan
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from olq.kernels.batch import Batch, Job, job_of
from olq.methods.base import Call, QuantMethod, WeightPlan
from olq.methods.state import FORMAT_SUFFIX, LayerState
from olq.patterns import join
from olq.reload.cutting import Piece
from olq.reload.plans import Copy, Plan, made_for, made_for_parameter
from olq.reload.quantized import QuantizedWeight


def _nothing() -> None:
    """No job."""


@dataclass(slots=True)
class Write:
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
        index = self.piece.index
        whole = tensor if self.copy.view is None else self.copy.source(tensor)
        return whole if index is None else whole[index]


@dataclass(slots=True)
class Member:
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
    writes: list[Write] = field(default_factory=list)
    addresses: tuple[int, ...] = ()


class Routine:
    """Plans that together bring every quantized weight of a model, each element once."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.writes: dict[int, list[Write]] = {}
        self.weights: dict[str, Member] = {}

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
            routine.weights[one.label] = Member(made_for(one), one.parameter.shape)
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
                found = [Write(copy, piece) for piece in copy.pieces]
                weight.writes += found
                writes += found
            routine.writes[id(plan)] = writes
        return routine if routine.weights and not any(left.values()) else None

    def came_with(self, plans: Mapping[int, Plan], weights: Iterable[QuantizedWeight]) -> bool:
        """Whether a complete load of just these weights was brought by this routine, whatever else came.

        Args:
            plans: that were used, by id.
            weights: all quantized weights of the model.
        """
        return self.plans.keys() <= plans.keys() and self.weights.keys() == {one.label for one in weights}


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
    weight: Member
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
        state, leaf, parameter = self.state, self.leaf, self.parameter
        if not (
            self.routine is routine
            and self.name == name
            and self.layer is layer
            and self.plan is state.plans[leaf]
            and parameter is state.load_parameters[leaf]
            and self.loader is parameter.__dict__.get("weight_loader")
            and self.method is layer.__dict__["quant_method"]
        ):
            return False
        mine = layer._parameters
        for key, tensor in self.named:  # noqa: SIM110  (a generator would take as long as all the rest)
            if mine.get(key) is not tensor:
                return False
        return True

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

    def add(self, batch: Batch, write: Write, tensor: Tensor) -> None:
        """Do one piece of a copy: in a batch, if a kernel can. `follow` comes first.

        Args:
            batch: not launched yet.
            write: of this weight.
            tensor: that was fed.
        """
        source, job = write.source(tensor), write.job()
        plain = (
            type(source) is Tensor or type(source) is nn.Parameter
        )  # others may have no memory of their own
        if plain and job is not None and batch.add(job, source):
            return
        if plain and write.kernel:  # never done, or with a source of another alignment or device
            calls = self._calls(source, write.piece)
            job = job_of(calls) if calls else None
            write.kernel = job is not None
            if job is not None:
                self.jobs.append(job)
                write.job = weakref.ref(job)
                if batch.add(job, source):
                    return
        self.method.write_(source, self.tensors, self.plan, write.piece.target)

    def _calls(self, source: Tensor, piece: Piece) -> Sequence[Call] | None:
        """The calls that write a piece, if the method's `write_` is no more than these."""
        if type(self.method).write_ is not QuantMethod.write_:
            return None
        return self.method.calls(source, self.tensors, self.plan, piece.target)
