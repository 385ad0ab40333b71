"""What a layer carries between its construction, its loads and its forwards: one plain record, `layer.quant_state`."""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from olq.errors import StateError

if TYPE_CHECKING:
    from olq.methods.base import WeightPlan

#: Name of the attribute that holds a `LayerState`.
ATTRIBUTE = "quant_state"
#: Buffer of a live layer that says, as JSON in UTF-8, what its kernel tensors mean: the weight's name and this.
FORMAT_SUFFIX = "_format"


@dataclass
class LayerState:
    """The quantized weights of one layer.

    Args:
        device: where kernel tensors live.
        label: full path of the layer, for messages and reports; filled in when the model is known.
        plans: for each weight by parameter name, how it is stored.
        load_parameters: the load-format Parameter objects, kept for the layer's life so that their attributes
            (loaders, subclass, marks of the engine) survive every reload.
        kernel: kernel tensors by name while they are not installed, that is between begin and commit.
        tags: what the kernel tensors mean, by buffer name, while they are not installed: they keep addresses too.
        live: True while the kernel tensors are those of a committed load: from a commit to the next begin, or through
            a shadow load. A forward is legal only then.
        held: why a live layer may not be called although its own tensors are in place: a load of other layers of its
            model is open, or failed.
        generation: number of commits; anything derived from the weights can compare it.
        method: the method's name, and `reason` why this layer has it.
        open: the running load of this layer, owned by `olq.reload`.
        owner: the session that writes its kernel tensors without opening it; it is held then.
        made: what such sessions keep ready for the next one, by weight. It holds memory, so a move drops it.
    """

    device: torch.device
    label: str = ""
    plans: dict[str, "WeightPlan"] = field(default_factory=dict)
    load_parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    kernel: dict[str, Tensor] = field(default_factory=dict)
    tags: dict[str, Tensor] = field(default_factory=dict)
    live: bool = False
    held: str = ""
    generation: int = 0
    reason: str = ""
    open: Any = None
    owner: Any = None
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether the kernel tensors stand in the module, instead of load-format parameters."""
        return self.live and self.open is None

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerState":
        """Copy for a copied layer. Parameters keep their class and attributes, which torch's own copy drops."""
        self._check_at_rest()
        twin = LayerState(
            self.device,
            self.label,
            live=self.live,
            held=self.held if self.owner is None else "",
            generation=self.generation,
            reason=self.reason,
        )
        memo[id(self)] = twin
        twin.plans = dict(self.plans)
        twin.kernel, twin.tags = copy.deepcopy(self.kernel, memo), copy.deepcopy(self.tags, memo)
        for name, parameter in self.load_parameters.items():
            clone = memo.get(id(parameter))
            if clone is None:
                clone = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                clone.__class__ = parameter.__class__
            memo[id(parameter)] = clone
            vars(clone).update(copy.deepcopy(vars(parameter), memo))
            twin.load_parameters[name] = cast("nn.Parameter", clone)
        twin.open = copy.deepcopy(self.open, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: parameters with their classes beside them, which torch's own pickling drops."""
        self._check_at_rest()
        classes = {name: _plain_class(parameter) for name, parameter in self.load_parameters.items()}
        held = self.held if self.owner is None else ""
        return {**vars(self), "open": None, "owner": None, "held": held, "made": {}, "classes": classes}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        """Give the parameters their classes back."""
        classes = pickled.pop("classes")
        vars(self).update(pickled)
        for name, parameter in self.load_parameters.items():
            parameter.__class__ = classes[name]

    def _check_at_rest(self) -> None:
        # live: a load beside what serves
        writing = self.owner is not None and self.owner.started
        if writing or (self.open is not None and (self.open.started or self.live)):
            raise StateError(
                "A layer can't be copied or pickled while its weights are arriving.",
                where=self.label,
                found="a running load",
                need="a layer before its first weight or after its commit",
                remedy="finish or abort the load first",
            )


def _plain_class(parameter: nn.Parameter) -> type:
    """The class that a parameter has outside of a load."""
    return getattr(type(parameter), "_olq_plain", None) or type(parameter)


def find_state(layer: nn.Module) -> LayerState | None:
    """The layer's record, or None if it has no quantized weights."""
    state: LayerState | None = layer.__dict__.get(ATTRIBUTE)
    return state


def state_of(layer: nn.Module) -> LayerState:
    """The record of a layer that has quantized weights."""
    state: LayerState = layer.__dict__[ATTRIBUTE]
    return state


def make_state(layer: nn.Module, device: torch.device, label: str) -> LayerState:
    """The layer's record, made if it has none."""
    state = find_state(layer)
    if state is None:
        state = LayerState(device, label)
        layer.__dict__[ATTRIBUTE] = state
    return state


def require_live(layer: nn.Module) -> None:
    """Raise `StateError` unless all of the layer's weights are in place."""
    state = find_state(layer)
    if state is None or (state.live and not state.held):
        return
    raise StateError(
        "A layer was called before its weights were complete.",
        where=state.label or type(layer).__name__,
        found=state.held
        or ("a load that is open" if state.open is not None else "weights that were never loaded"),
        need="a committed load: every element arrived and finalize has run",
        remedy="finish the load (olq.load, or finalize_layerwise_processing), or load again after an error",
    )
