"""prepare: turn the linear layers of any module into quantized ones, by configuration and with reasons."""

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from olq.config import KEEP, QuantConfig
from olq.errors import ConfigError
from olq.methods.state import find_state
from olq.registry import get_method
from olq.reload import online
from olq.reload.linear import QuantLinear, attach_load_state_dict, take_over
from olq.reload.names import TIES, materialize
from olq.reload.region import whole
from olq.reload.reporting import KEPT
from olq.rules import Resolver

if TYPE_CHECKING:
    from olq.methods.base import QuantMethod

_log = logging.getLogger("olq")

#: Modules of torch that read the weights of these children themselves, in fused operators.
_READERS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),
}
#: A layer, its method, and why.
Choice = tuple[nn.Linear, "QuantMethod", str]


def prepare(
    model: nn.Module, config: QuantConfig | None = None, *, device: torch.device | str | None = None
) -> nn.Module:
    """Get a model ready to be quantized while it loads, or quantize one that has weights.

    Every plain `nn.Linear` is decided by the configuration. Weights on the meta device become load-format
    parameters that `olq.load`, `load_state_dict` or a session fill; weights with values are quantized now, layer by
    layer, and freed. What stays in high precision gets memory if it has none. Layers that are quantized already stay
    as they are; asking for another method for one of them is an error.

    Args:
        model: any module; changed in place.
        config: None is `QuantConfig()`: fp8 for each output channel.
        device: where kernel tensors will live; None is each weight's own device, CPU for those on meta.

    Returns:
        The model.

    Raises:
        ConfigError: a pattern fits nothing, or a decision can't be carried out.
        UnknownNameError: no such method.
        LayoutError: a method can't store one of its layers.
        NonFiniteError: a weight that is quantized now holds inf or NaN. Its layer and those after it are left as they
            were; those before it are quantized. The model can be prepared again.
    """
    resolver = Resolver(config or QuantConfig())
    linears, others = _candidates(model)
    resolver.see(
        name for name, _ in model.named_modules() if name and name not in linears and name not in others
    )
    chosen: dict[str, Choice] = {}
    kept = dict(model.__dict__.get(KEPT, {}))
    for name, layer in linears.items():
        decision = resolver.decide(name)
        method = get_method(decision.method, **decision.params)
        if method.quantizes:
            chosen[name] = layer, method, decision.reason
        else:
            kept[name] = decision.reason
    for name, reason in others.items():
        decision = resolver.decide(name)
        kept[name] = decision.reason if decision.method == KEEP else reason
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            _same_method(name, layer, resolver)
    resolver.finish()
    model.__dict__[KEPT] = kept
    model.__dict__[TIES] = {**model.__dict__.get(TIES, {}), **_ties(model, chosen)}
    for name, (layer, method, reason) in chosen.items():
        _quantize_layer(name, layer, method, reason, device)
    materialize(model, device if device is not None else "cpu")
    attach_load_state_dict(model)
    return model


def _candidates(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Plain linear layers by name; and layers that look like ones and can't be taken over, with the reason."""
    linears: dict[str, nn.Linear] = {}
    others: dict[str, str] = {}
    read_by = {
        id(getattr(parent, leaf)): kind.__name__
        for parent in model.modules()
        for kind, leaves in _READERS.items()
        if isinstance(parent, kind)
        for leaf in leaves
    }
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) or not isinstance(module, nn.Linear):
            continue
        if not name:
            raise ConfigError(
                "A layer without a parent has no name that a rule could match.",
                where="prepare",
                found=f"a bare {type(module).__name__}",
                need="a module that contains the layers",
                remedy="wrap it: nn.Sequential(layer)",
            )
        if id(module) in read_by:
            others[name] = f"nn.{read_by[id(module)]} reads this weight directly"
        elif type(module) is not nn.Linear:
            others[name] = f"{type(module).__name__} is a subclass of nn.Linear with behaviour of its own"
        elif module._parameters.get("weight") is None:
            others[name] = "its weight is computed by a hook"
        else:
            linears[name] = module
    return linears, others


def _same_method(name: str, layer: QuantLinear, resolver: Resolver) -> None:
    """A layer that is quantized already keeps its method: asking for another is an error, not a wish ignored."""
    decision = resolver.decide(name)
    asked = get_method(decision.method, **decision.params)
    if asked != layer.quant_method:
        raise ConfigError(
            "A layer was prepared before, with another method.",
            where=name,
            found=f"{layer.quant_method}; this configuration asks for {asked} ({decision.reason})",
            need="the method that the layer has, since its full-precision weight is gone",
            remedy="prepare a freshly constructed model, or use the same configuration",
        )


def _ties(model: nn.Module, chosen: "Mapping[str, Choice]") -> dict[str, str]:
    """Quantized weights that are tied: their names to the name whose arrivals they take.

    That is the name of one that stays in high precision, if there is any.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{leaf}" if name else leaf)
    weights = {f"{name}.weight" for name in chosen}
    ties: dict[str, str] = {}
    for names in owners.values():
        followers = [name for name in names if name in weights]
        others = [name for name in names if name not in weights]
        leader = others[0] if others else names[0]
        for name in followers:
            if name != leader:
                ties[name] = leader
                _log.info("%s was tied to %s; it is quantized and stored on its own", name, leader)
    return ties


def _quantize_layer(
    name: str, layer: nn.Linear, method: "QuantMethod", reason: str, device: torch.device | str | None
) -> None:
    """Take a layer over; quantize its weight now if it has values. After an error the layer is as it was."""
    weight = layer.weight
    target = torch.device(device) if device is not None else weight.device
    target = torch.device("cpu") if target.type == "meta" else target
    before = dict(layer.__dict__), dict(layer._parameters), layer.__class__
    try:
        take_over(layer, method, device=target, label=name, reason=reason)
        if weight.device.type != "meta":
            load = online.open_layer(layer)
            progress = load.weights["weight"]
            progress.arrive(whole(weight.shape), weight.detach(), progress.label)
            online.install(layer)
    except BaseException:
        if find_state(layer) is not None:
            online.abort(layer)
        layer.__dict__.clear()
        layer.__dict__.update(before[0])
        layer._parameters.clear()
        layer._parameters.update(before[1])
        layer.__class__ = before[2]
        raise


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Construct modules with their parameters on the meta device and their buffers real.

    Under `torch.device("meta")` buffers are lost too, though some (rotary frequencies, masks) are computed in a
    constructor and stand in no checkpoint. Here a parameter moves to meta when it is registered, so that at most one
    is in memory, and its initialisation costs nothing.
    """
    original = nn.Module.register_parameter
    moved: dict[
        int, tuple[weakref.ref[Any], nn.Parameter]
    ] = {}  # a parameter of two modules stays one parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is None or param.device.type == "meta":
            return
        known = moved.get(id(param))
        if known is None or known[0]() is not param:
            twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            twin.__class__ = type(param)
            vars(twin).update(vars(param))
            known = moved[id(param)] = weakref.ref(param), twin
        module._parameters[name] = known[1]

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
