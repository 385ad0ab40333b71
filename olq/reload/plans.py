"""Plans of what loaders do with tensors: recorded in one load, repeated in later ones by `olq.reload.replay`.

A loader that only copies slices of the fed tensor into slices of parameters does the same whenever a tensor of the same
shape and strides comes under the same name. Whatever does more than views and copies (a cast, a sum, an index, values
of another tensor) has no plan.

    plan       signature and, for each copy, (parameter, box, where its source lies in the fed tensor, units)
    plan key   what else a loader looks at (an expert map that moved) is the caller's to say
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from olq.methods.base import WeightPlan
from olq.reload.cutting import Piece, cut
from olq.reload.ledger import storage_key
from olq.reload.online import WrappedLoader
from olq.reload.progress import Progress
from olq.reload.quantized import QuantizedWeight
from olq.reload.region import Box, Masks, intersect, masks, size, whole
from olq.reload.trace import Trace
from olq.reload.tree import layers_of
from olq.reload.views import overlaps_itself, resolve, span

if TYPE_CHECKING:
    from olq.reload.routine import Routine

#: Attribute of a model that holds its `Plans`.
PLANS = "quant_plans"

#: Says what else than name, shard and tensor a loader of this name looks at.
PlanKey = Callable[[str], Hashable]
Key = str | tuple[Any, ...]
#: Types of shard ids: what never changes, and equals itself only.
_SHARDS = frozenset({str, int, float, bool, bytes, type(None), torch.dtype})


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a plan.

    Args:
        label: the parameter.
        shape: of the parameter.
        made_for: how it is stored and the loader it has: a layer of the same name with others takes no such plan.
        box: its elements.
        product: `masks(box)`.
        elements: `size(box)`.
        view: (size, strides, offset) of the source relative to the fed tensor; None is all of it.
        pieces: how a quantized weight cuts it.
    """

    label: str
    shape: torch.Size
    made_for: tuple[WeightPlan | None, Any]
    box: Box
    product: Masks
    elements: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    pieces: tuple[Piece, ...]

    def fits(self, progress: Progress | None) -> bool:
        """Whether this is the parameter that the copy was recorded for, or its like."""
        return (
            progress is not None
            and not progress.followers
            and progress.parameter.shape == self.shape
            and made_for(progress) == self.made_for
        )

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
        #: Those that together brought all quantized weights in the last load of everything.
        self.routine: Routine | None = None
        #: Whether the model's load_weights did nothing beside its items: nothing is lost if it is not called.
        self.loop_only = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plans":
        return Plans()

    def __reduce__(self) -> Any:
        return (Plans, ())


def forget_plans(model: nn.Module) -> None:
    """Let every loader run once more: after a change that loaders see and no plan key tells.

    Also before kernel tensors are moved past torch's `Module.to`, by `parameter.data = ...`: what repeated loads keep
    ready holds their memory.

    Args:
        model: any; without plans nothing happens.
    """
    model.__dict__.pop(PLANS, None)
    for _, _, state in layers_of(model):
        state.made.clear()


def copies_of(trace: Trace, tensor: Tensor) -> tuple[Copy, ...] | None:
    """What a loader did with a tensor, or None if it did more than copy from it."""
    if trace.computed:
        return None
    copies: list[Copy] = []
    for progress, box, source in trace.arrivals:
        if source is None or progress.followers or source.dtype != tensor.dtype:
            return None
        if not _inside(source, tensor):
            return None  # of another tensor, which the loader had kept; both may lie in one bucket
        if any(c.label == progress.label and all(map(intersect, c.box, box)) for c in copies):
            return None  # a later copy won over an earlier one
        copies.append(_copy(progress, box, source, tensor))
    return tuple(copies)


def _copy(progress: Progress, box: Box, source: Tensor, tensor: Tensor) -> Copy:
    view = None
    if (
        source.shape != tensor.shape
        or source.stride() != tensor.stride()
        or source.data_ptr() != tensor.data_ptr()
    ):
        view = tuple(source.shape), source.stride(), int(source.storage_offset() - tensor.storage_offset())
    pieces = tuple(cut(progress.plan, box)) if isinstance(progress, QuantizedWeight) else ()
    return Copy(
        progress.label,
        progress.parameter.shape,
        made_for(progress),
        box,
        masks(box),
        size(box),
        view,
        pieces,
    )


def made_for(progress: Progress) -> tuple[WeightPlan | None, Any]:
    """What a plan depends on besides shapes: how a weight is cut, and the loader that was recorded."""
    plan = progress.plan if isinstance(progress, QuantizedWeight) else None
    return made_for_parameter(plan, progress.parameter)


def made_for_parameter(plan: WeightPlan | None, parameter: Tensor) -> tuple[WeightPlan | None, Any]:
    """The same of a parameter without an account."""
    loader = getattr(parameter, "weight_loader", None)
    return plan, loader.loader if isinstance(loader, WrappedLoader) else loader


def _inside(source: Tensor, tensor: Tensor) -> bool:
    """Whether all elements of one tensor are elements of another: a view of it, and not of its neighbours."""
    if storage_key(source) != storage_key(tensor):
        return False
    (first, last), (start, stop) = span(source), span(tensor)
    if first < start or last > stop:
        return False
    if (first, source.shape, source.stride()) == (start, tensor.shape, tensor.stride()):
        return True
    if overlaps_itself(tensor):
        return False
    dense = tensor.numel() * tensor.element_size() == stop - start
    return dense or resolve(tensor, source) is not None


def key_of(name: str, loader_args: tuple[Any, ...]) -> Key | None:
    """What tells calls of loaders apart; 0 and False are two shards. None if an argument may change, or be no key."""
    if not loader_args:
        return name
    if len(loader_args) == 1 and type(loader_args[0]) in _SHARDS:  # the common case
        return name, type(loader_args[0]), loader_args[0]
    parts = tuple(map(_part, loader_args))
    return None if None in parts else (name, *parts)


def _part(arg: object) -> tuple[Any, ...] | None:
    kind = type(arg)
    if kind in _SHARDS or isinstance(arg, Enum):
        return kind, arg
    if kind is tuple:
        parts = tuple(map(_part, cast("tuple[Any, ...]", arg)))
        return None if None in parts else (kind, *parts)
    return None


def whole_trace(progress: Progress, tensor: Tensor) -> Trace:
    """The trace of a plain copy of the whole parameter."""
    trace = Trace()
    trace.arrivals.append((progress, whole(progress.parameter.shape), tensor))
    return trace
