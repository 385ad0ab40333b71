"""Which name means which parameter, found once a session."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from olq.errors import StateError
from olq.methods.state import find_state
from olq.reload import online
from olq.reload.progress import PlainParameter, Progress, QuantizedWeight
from olq.reload.stage import Meter

#: Attribute of a prepared model: names of untied parameters to the name that they were tied to.
TIES = "quant_ties"


@dataclass
class Names:
    """The parameters of a model during a session.

    Attributes:
        layers: layers with quantized weights, by name.
        routes: names that a source may use, each with what is behind it.
        aliases: second names of tied parameters, each with the first name.
        saved: names of kernel tensors and tags of a saved model, each with its layer.
        progress: every parameter and persistent buffer, once.
        required: those without which a load is not complete.
        leaders: for a weight that was untied, the parameter whose arrivals it takes.
    """

    layers: dict[str, nn.Module] = field(default_factory=dict)
    routes: dict[str, Progress] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    saved: dict[str, nn.Module] = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)
    required: list[Progress] = field(default_factory=list)
    leaders: dict[Progress, Progress] = field(default_factory=dict)

    def names_of(self, progress: Progress) -> list[str]:
        """All names under which a parameter may arrive, that of its saved codes' tag included."""
        source = self.leaders.get(progress, progress)
        names = [name for name, one in self.routes.items() if one is source]
        if isinstance(progress, QuantizedWeight):
            names.append(progress.label + online.FORMAT_SUFFIX)
        return names


def collect(model: nn.Module, meter: Meter, measure: bool) -> Names:
    """Open all layers of a model and list what may arrive.

    Raises:
        StateError: the model has no quantized weights and is not prepared, or a load of it is open.
    """
    names = Names()
    for name, layer in model.named_modules():
        state = find_state(layer)
        if state is None:
            continue
        if state.open is not None and state.open.started:
            raise StateError(
                "A load of this model is open already.",
                where=name or type(model).__name__,
                found="a layer for which weights have arrived and that is not committed",
                need="one load at a time",
                remedy="finalize or abort the other load first",
            )
        state.label = name
        state.open = None  # an unstarted load: this session counts for itself
        names.layers[name] = layer
    for name, layer in names.layers.items():
        load = online.open_layer(layer, meter=meter, measure=measure)
        for weight_name, weight in load.weights.items():
            _add(names, weight, _join(name, weight_name), required=True)
            for suffix in (*weight.plan.tensors, online.FORMAT_SUFFIX):
                names.saved[_join(name, weight_name + suffix)] = layer
    _add_plain(model, names)
    _untie(model, names)
    return names


def near(name: str, known: Iterable[str]) -> str:
    """Close matches of a name, in words for a message."""
    found = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    if not found:
        tail = name.split(".")[-2:]
        found = [other for other in known if other.split(".")[-2:] == tail][:2]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _add_plain(model: nn.Module, names: Names) -> None:
    """Everything that is not a quantized weight: parameters, and the buffers that a checkpoint may hold."""
    seen: dict[int, tuple[str, Progress]] = {id(one.parameter): (one.label, one) for one in names.progress}
    tensors: list[tuple[str, Tensor, bool]] = [
        (name, p, True) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    persistent = _persistent_buffers(model)
    tensors += [
        (name, b, False) for name, b in model.named_buffers(remove_duplicate=False) if name in persistent
    ]
    for name, tensor, required in tensors:
        if name in names.routes:
            continue
        known = seen.get(id(tensor))
        if known is not None:
            names.routes[name], names.aliases[name] = known[1], known[0]
            continue
        plain = _plain_of(names, name, tensor)
        seen[id(tensor)] = name, plain
        _add(names, plain, name, required=required)


def _plain_of(names: Names, name: str, tensor: Tensor) -> Progress:
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
    state = find_state(layer) if layer is not None else None
    if state is not None and leaf in state.open.plains:
        return state.open.plains[leaf]
    return PlainParameter(name, tensor)


def _untie(model: nn.Module, names: Names) -> None:
    """Parameters that were one object before prepare: the second takes what arrives for the first."""
    ties: Mapping[str, str] = model.__dict__.get(TIES, {})
    for name, primary in ties.items():
        follower, leader = names.routes[name], names.routes[primary]
        if isinstance(follower, QuantizedWeight):
            leader.followers.append(follower)
            names.leaders[follower] = leader
            names.routes[name], names.aliases[name] = leader, primary


def _persistent_buffers(model: nn.Module) -> set[str]:
    return {
        _join(prefix, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _add(names: Names, progress: Progress, name: str, *, required: bool) -> None:
    progress.label = name
    names.routes[name] = progress
    names.progress.append(progress)
    if required:
        names.required.append(progress)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def materialize(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give memory to what stays in high precision and is still on the meta device; the rest is untouched.

    Args:
        model: any module. Quantized weights keep their load-format parameters on meta.
        device: where the memory is made, uninitialised.

    Returns:
        The model. Parameter objects, their classes and attributes stay.
    """
    skip = {
        id(p) for m in model.modules() if (state := find_state(m)) for p in state.load_parameters.values()
    }
    swapped: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type != "meta" or id(tensor) in skip:
                    continue
                if id(tensor) not in swapped:
                    swapped[id(tensor)] = _with_memory(tensor, torch.device(device))
                tensors[name] = swapped[id(tensor)]
    return model


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """The same tensor object, or for a buffer a new one, with uninitialised memory on `device`."""
    real = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return real
    twin = nn.Parameter(real, requires_grad=tensor.requires_grad)
    twin.__class__ = type(tensor)
    vars(twin).update(vars(tensor))
    torch.utils.swap_tensors(tensor, twin)  # engines hold the object
    return tensor
