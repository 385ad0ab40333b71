"""Which name means which parameter, found once a session."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from olq.errors import StateError
from olq.methods.state import FORMAT_SUFFIX, find_state, state_of
from olq.patterns import join
from olq.reload import online
from olq.reload.declarations import declared
from olq.reload.ledger import storage_key
from olq.reload.progress import Outside, PlainParameter, Progress
from olq.reload.quantized import QuantizedWeight
from olq.reload.refusals import open_already
from olq.reload.region import Coverage
from olq.reload.repeat import Repeat
from olq.reload.scope import Scope
from olq.reload.stage import Meter
from olq.reload.tree import NOTHING, Tree

#: Attribute of a prepared model: names of untied parameters to the name that they were tied to.
TIES = "quant_ties"
#: Attribute of a model: names of buffers that `materialize` gave memory to and that nothing has been written to.
UNWRITTEN = "quant_unwritten"


@dataclass
class Names:
    """The parameters of a model during a session.

    Attributes:
        layers: layers with quantized weights that the load covers, by name. They are open, unless `repeat` is there.
        named: every name of every such layer, with the layer.
        places: quantized weights by name: the layer, and the name there.
        plain: everything else by name, parameters and persistent buffers.
        optional: those of them without which a load is complete.
        aliases: second names of tied parameters, each with the first name.
        leaders: for a weight that was untied, the parameter whose arrivals it takes.
        outside: what a partial load leaves alone, by name: parameters and kernel tensors.
        stale: the parameters among them, each with its number of elements.
        repeat: what writes quantized weights as long as nobody asks for their accounts.
        opener: opens a layer.
        loads: of the layers that were opened.
        ended: the load is over: layers stay as they are, whatever is asked.
    """

    layers: dict[str, nn.Module] = field(default_factory=dict)
    named: list[tuple[str, nn.Module]] = field(default_factory=list)
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    plain: dict[str, Progress] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    leaders: dict[QuantizedWeight, Progress] = field(default_factory=dict)
    outside: dict[str, Outside] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)
    repeat: Repeat | None = None
    opener: Callable[[nn.Module], online.LayerLoad] = online.open_layer
    loads: dict[nn.Module, online.LayerLoad] = field(default_factory=dict)
    ended: bool = False
    _after: dict[str, QuantizedWeight] = field(default_factory=dict)

    def open(self) -> None:
        """End a repeat: open the layers, and give each weight the account that it would have had."""
        repeat = self.repeat
        if repeat is None:
            return
        with repeat.lock:
            if self.repeat is None:  # another thread was here
                return
            if self.ended:
                self._after = {label: repeat.account(label) for label in self.places}
                repeat.hand_over(self._after)
                self.repeat = None
                return
            repeat.stop()
            for name, layer in self.layers.items():
                state = state_of(layer)
                if state.open is not None:
                    raise open_already(name)
                owner, state.owner, state.held = state.owner, None, ""
                self.loads[layer] = self.opener(layer)
                self.loads[layer].owner = owner
            repeat.hand_over({label: self._weight(label) for label in self.places})
            self.repeat = None

    def find(self, label: str) -> Progress | None:
        """The parameter of this first name."""
        if label not in self.places:
            return self.plain.get(label)
        self.open()
        return self._weight(label)

    @cached_property
    def weights(self) -> list[QuantizedWeight]:
        """Every quantized weight."""
        self.open()
        return [self._weight(label) for label in self.places]

    def _weight(self, label: str) -> QuantizedWeight:
        if self._after:
            return self._after[label]
        layer, leaf = self.places[label]
        return self.loads[layer].weights[leaf]

    @cached_property
    def progress(self) -> list[Progress]:
        """Every parameter and persistent buffer, once."""
        return [*self.weights, *self.plain.values()]

    @property
    def required_plain(self) -> Iterator[Progress]:
        """What is not a quantized weight and has to be there for a load to be complete."""
        return (one for name, one in self.plain.items() if name not in self.optional)

    @cached_property
    def required(self) -> list[Progress]:
        """Those without which a load is not complete."""
        return [*self.weights, *self.required_plain]

    @property
    def devices(self) -> set[torch.device]:
        """Where what has elements is stored."""
        states = [(state_of(layer), name) for layer, name in self.places.values()]
        return {state.device for state, name in states if state.load_parameters[name].numel()} | {
            one.parameter.device for one in self.plain.values() if one.parameter.numel()
        }

    def knows(self, name: str) -> bool:
        """Whether a source may use this name for a parameter."""
        return name in self.places or name in self.plain or name in self.aliases

    def hold_saved(self, given: Iterable[str]) -> bool:
        """Whether some names are of tensors that only the saved state of a quantized model has."""
        return any(name in self.saved and not self.knows(name) for name in given)

    def repeated_by(self, given: Iterable[str]) -> bool:
        """Whether names are all that a repeat needs."""
        labels = {self.aliases.get(name, name) for name in given}
        return self.repeat is not None and labels.issuperset(
            (*self.places, *(one.label for one in self.required_plain))
        )

    @cached_property
    def routes(self) -> dict[str, Progress]:
        """Names that a source may use, each with what is behind it."""
        routes = dict(zip((*self.places, *self.plain), self.progress, strict=True))
        routes.update((name, routes[first]) for name, first in self.aliases.items())
        return routes

    @cached_property
    def saved(self) -> dict[str, nn.Module]:
        """Names of kernel tensors and tags of a saved model, each with its layer."""
        return {
            full: layer
            for name, layer in self.named
            for weight, plan in state_of(layer).plans.items()
            if join(name, weight) not in self.outside
            for full in (join(name, weight + suffix) for suffix in (*plan.tensors, FORMAT_SUFFIX))
        }

    def names_of(self, progress: Progress) -> list[str]:
        """All names under which a parameter may arrive, that of its saved codes' tag included."""
        source = self.leaders.get(progress, progress) if isinstance(progress, QuantizedWeight) else progress
        names = [name for name, one in self.routes.items() if one is source]
        if isinstance(progress, QuantizedWeight):
            names.append(progress.label + FORMAT_SUFFIX)
        return names

    def release(self, given: Iterable[str]) -> None:
        """Let untied weights whose saved kernel tensors arrive take nothing from their leaders any more.

        Args:
            given: names that have arrived, or that will.
        """
        given = set(given)
        for follower, leader in list(self.leaders.items()):
            names = [follower.label + suffix for suffix in (*follower.plan.tensors, FORMAT_SUFFIX)]
            if given.isdisjoint(names[1:]):
                continue
            del self.leaders[follower]
            leader.followers.remove(follower)
            follower.discard()
            follower.coverage = Coverage(follower.parameter.shape)


def collect(
    tree: Tree,
    meter: Meter,
    measure: bool,
    *,
    scope: Scope | None = None,
    shadow: str | None = None,
    repeat: Repeat | None = None,
) -> Names:
    """Open the layers of a model and list what may arrive.

    Args:
        tree: of a model that has layers with quantized weights, none of them open.
        meter: counts staged bytes.
        measure: whether to keep quantization errors.
        scope: what a partial load covers; None is everything.
        shadow: see `online.LayerLoad`.
        repeat: writes all quantized weights: the layers stay closed, and are kept from being called.

    Raises:
        StateError: something that has to have memory has none.
        ConfigError: a pattern of the scope matches nothing.
    """
    names = Names(repeat=repeat)
    names.opener = partial(online.open_layer, meter=meter, measure=measure, shadow=shadow, plains=names.plain)
    scope = scope or Scope()
    if scope.partial:
        _choose(tree, scope)
    if repeat is not None:
        _leave_closed(tree, names, repeat)
    for name, layer, state in tree.layers if repeat is None else ():
        state.label = name
        if not any(scope.covers(join(name, weight)) for weight in state.plans):
            for weight, plan in state.plans.items():
                names.stale[join(name, weight)] = math.prod(plan.geometry.shape)
                for suffix in plan.tensors:
                    _leave(names, join(name, weight + suffix), getattr(layer, weight + suffix))
            continue
        names.layers[name] = layer
        names.loads[layer] = names.opener(layer)
        for weight_name, parameter in state.load_parameters.items():
            if scope.covers(full := join(name, weight_name)):
                names.places[full] = layer, weight_name
            else:
                names.stale[full] = parameter.numel()
                _leave(names, full, parameter)
    if repeat is None:
        layers = set(names.layers.values())
        names.named = [(name, module) for name, module in tree.named if module in layers]
    _add_plain(tree, names, scope, shadow)
    _untie(tree, names)
    return names


def _leave_closed(tree: Tree, names: Names, repeat: Repeat) -> None:
    """List the layers that a repeat writes: all there are, none of them under a second name."""
    for name, layer, state in tree.layers:
        state.label = name
        names.layers[name] = layer
    names.named = list(names.layers.items())
    names.places = {label: (one.layer, one.leaf) for label, one in repeat.targets.items()}


def _choose(tree: Tree, scope: Scope) -> None:
    """Let a scope see all names, and draw in what is tied to what it covers."""
    weights = [join(name, weight) for name, _, state in tree.layers for weight in state.plans]
    plain: dict[object, list[str]] = {}
    live = {
        join(name, weight + suffix)
        for name, _, state in tree.layers
        for weight, plan in state.plans.items()
        for suffix in (*plan.tensors, FORMAT_SUFFIX)
    }
    for name, tensor in (*tree.parameters(), *((name, buffer) for name, buffer, _ in tree.buffers())):
        if name not in live and name not in weights:
            plain.setdefault(_identity(tensor), []).append(name)
    scope.choose(weights, plain.values(), _ties(tree))


def _is_tag(name: str, weights: Iterable[str]) -> bool:
    """Whether this is the buffer that says what a quantized weight's bytes mean."""
    return name.endswith(FORMAT_SUFFIX) and name.removesuffix(FORMAT_SUFFIX) in weights


def _leave(names: Names, name: str, tensor: Tensor) -> None:
    """Note a tensor that a partial load may not write."""
    names.outside[name] = Outside(name, tensor)


def near(name: str, known: Iterable[str]) -> str:
    """Close matches of a name, in words for a message."""
    found = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    if not found:
        tail = name.split(".")[-2:]
        found = [other for other in known if other.split(".")[-2:] == tail][:2]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _add_plain(tree: Tree, names: Names, scope: Scope, shadow: str | None) -> None:
    """Everything that is not a quantized weight: parameters, and the buffers that a checkpoint may hold."""
    seen: dict[object, str] = {}
    closed = NOTHING if names.repeat is None else names.repeat.kernel
    if names.repeat is None:
        seen = {
            id(state_of(layer).load_parameters[leaf]): name for name, (layer, leaf) in names.places.items()
        }
    tensors: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in tree.parameters(closed)]
    derived = declared(tree)
    unwritten = {join(prefix, name) for prefix, found in tree.notes(UNWRITTEN) for name in found}
    for name, buffer, persistent in tree.buffers(closed):
        if persistent:
            garbage = name in unwritten and not buffer.is_inference() and not buffer._version
            tensors.append((name, buffer, garbage))
        elif buffer.device.type == "meta" and name not in derived:
            raise _lost_buffer(name)
    for name, tensor, required in tensors:
        if name in names.places or name in names.outside:
            continue
        if name in derived:  # computed at the commit; a saved model may bring it, nobody has to
            if tensor.device.type == "meta":
                continue
            required = False
        if not scope.covers(name):
            _leave(names, name, tensor)
            if not _is_tag(name, names.stale):
                names.stale[name] = tensor.numel()
            continue
        first = seen.setdefault(_identity(tensor), name)
        if first != name:
            names.aliases[name] = first
            continue
        plain = names.plain[name] = _plain_of(names, name, tensor, shadow)
        plain.label = name
        if not required:
            names.optional.add(name)


def _identity(tensor: Tensor) -> object:
    """What two names of one parameter have in common: the object, or the memory of `nn.Parameter(other.data)`."""
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _plain_of(names: Names, name: str, tensor: Tensor, shadow: str | None) -> Progress:
    """The progress that the tensor's layer keeps, or a new one."""
    if tensor.device.type == "meta":
        raise StateError(
            "A parameter that stays in high precision has no memory.",
            where=name,
            found="a tensor on the meta device that is not quantized",
            need="real memory, made before the load begins",
            remedy="call olq.prepare(model, config), or olq.materialize(model, device)",
        )
    parent, _, leaf = name.rpartition(".")
    layer = names.layers.get(parent)
    load = online.load_of(layer) if layer is not None else None
    if load is not None and leaf in load.plains:
        return load.plains[leaf]
    return PlainParameter(name, tensor, online.shadow_device(shadow, tensor))


def _untie(tree: Tree, names: Names) -> None:
    """Parameters that were one object before prepare: the second takes what arrives for the first."""
    for name, primary in _ties(tree):
        follower, leader = names.routes.get(name), names.routes.get(primary)
        if isinstance(follower, QuantizedWeight) and leader is not None:
            leader.followers.append(follower)
            names.leaders[follower] = leader
            names.routes[name], names.aliases[name] = leader, leader.label


def _ties(tree: Tree) -> list[tuple[str, str]]:
    """Names of parameters that were untied, each with the name that they were tied to."""
    return [
        (join(prefix, name), join(prefix, primary))
        for prefix, found in tree.notes(TIES)
        for name, primary in found.items()
    ]


def _lost_buffer(name: str) -> StateError:
    return StateError(
        "A buffer that stands in no checkpoint has no values.",
        where=name,
        found="a non-persistent buffer on the meta device",
        need="the values that the module's constructor computes",
        remedy="construct the model under olq.meta_parameters() instead of torch.device('meta'), or set the buffer",
    )


def materialize(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give memory to what stays in high precision and is still on the meta device; the rest is untouched.

    Args:
        model: any module. Quantized weights keep their load-format parameters on meta.
        device: where the memory is made, uninitialised. Persistent buffers that get memory here are then required
            from a checkpoint; non-persistent ones stay on meta, and a load refuses to begin until they are set.

    Returns:
        The model. Parameter objects, their classes and attributes stay.
    """
    skip = {
        id(p) for m in model.modules() if (state := find_state(m)) for p in state.load_parameters.values()
    }
    made: dict[int, Any] = {}
    unwritten: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.device.type == "meta" and id(parameter) not in skip:
                _give_memory(parameter, torch.device(device))
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device.type != "meta" or name in module._non_persistent_buffers_set:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = buffer, _empty_like(buffer, torch.device(device))
            module._buffers[name] = made[id(buffer)][1]
            unwritten.add(join(prefix, name))
    if unwritten:
        model.__dict__[UNWRITTEN] = unwritten.union(model.__dict__.get(UNWRITTEN, ()))
    return model


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be loaded outside of inference_mode
        return torch.empty_like(tensor, device=device)


def _give_memory(parameter: nn.Parameter, device: torch.device) -> None:
    """Uninitialised memory on `device` for a parameter on meta; the object stays, since engines hold it."""
    with torch.inference_mode(False):
        twin = nn.Parameter(_empty_like(parameter, device), requires_grad=parameter.requires_grad)
        twin.__class__ = type(parameter)
        vars(twin).update(vars(parameter))
        torch.utils.swap_tensors(parameter, twin)
