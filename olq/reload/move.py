"""`.to()`, `.half()`, `.to_empty()` on a module with quantized weights.

Kernel tensors are bytes with a meaning: a dtype cast would change float32 scales. So a layer's `_apply`, through which
all of these go, is guarded: a move takes the bytes along and says that addresses changed; a cast leaves kernel tensors
alone; load-format parameters, which have no memory, stay on the meta device.
"""

import functools
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from olq.methods.state import LayerState, find_state

#: Integer types by size: a view under which no cast to a float type applies.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_log = logging.getLogger("olq")


def guard_moves(layer: nn.Module) -> None:
    """Guard the layer's `_apply`. A second time changes nothing."""
    if "_apply" not in layer.__dict__:
        layer.__dict__["_apply"] = functools.partial(_apply, layer)


def _apply(layer: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    state = cast("LayerState", find_state(layer))
    installed = {
        name: tensor
        for name, tensor in layer._parameters.items()
        if tensor is not None and (_is_kernel(name, state) if state.live else name in state.plans)
    }
    order = list(layer._parameters)
    for name in installed:
        del layer._parameters[name]
    try:
        type(layer)._apply(layer, fn, recurse)
    finally:
        others = dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters.update({name: installed.get(name, others.get(name)) for name in order})
    if state.live:
        held = cast("dict[str, Tensor]", installed)
        for name, moved in _move(held, state, fn).items():
            cast("nn.Parameter", layer._parameters[name]).data = moved
    elif state.kernel:
        for name, moved in _move(state.kernel, state, fn).items():
            state.kernel[name].data = moved
    elif state.open is None or not state.open.started:
        probe = fn(torch.empty(0, dtype=torch.uint8, device=state.device))
        _new_device(state, probe.device)
    return layer


def _move(tensors: dict[str, Tensor], state: LayerState, fn: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Kernel tensors at their new place, byte for byte; empty if they stay."""
    probe = fn(torch.empty(0, dtype=torch.uint8, device=state.device))
    if probe.device == state.device or probe.device.type == "meta":
        for tensor in tensors.values():  # for what acts in place, such as share_memory(); casts skip integers
            fn(tensor.detach().view(_INTEGER[tensor.element_size()]))
        return {}
    _log.warning(
        "%s: kernel tensors moved from %s to %s; captured graphs and saved addresses are invalid",
        state.label or "a quantized layer",
        state.device,
        probe.device,
    )
    _new_device(state, probe.device)
    return {name: tensor.detach().to(probe.device) for name, tensor in tensors.items()}


def _new_device(state: LayerState, device: torch.device) -> None:
    if device.type == "meta":
        return
    state.device = device
    if state.open is not None:
        for weight in state.open.weights.values():
            weight.device = device


def _is_kernel(name: str, state: LayerState) -> bool:
    return any(name == weight + suffix for weight, plan in state.plans.items() for suffix in plan.tensors)
