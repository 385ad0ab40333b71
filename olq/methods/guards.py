"""What torch does to modules behind a method's back, on a layer with quantized weights: moves, casts, state dicts.

Kernel tensors are bytes with a meaning: a dtype cast would change float32 scales. `.to()`, `.half()`, `.to_empty()` and
the like all go through a module's `_apply`, which is guarded.

    a live layer     a move takes the bytes along and says that addresses changed; a cast, and `to_empty`, leave kernel
                     tensors and their tag alone.
    before its load  load-format parameters have no memory and stay on the meta device. A move says where the kernel
                     tensors will live; a cast is a cast of the load format: what arrives is rounded to the new dtype.
    during a load    moves as above; a cast is refused, since some units may be quantized already.

`load_state_dict` of a module that was not prepared itself (a part, or a wrapper) would copy full-precision values
into codes, or onto the meta device: a layer refuses it outside of a load.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from olq.errors import LayoutError, StateError
from olq.methods.state import FORMAT_SUFFIX, LayerState, state_of

if TYPE_CHECKING:
    from olq.methods.base import QuantMethod

#: What a load-format parameter can be.
LOAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Methods of a module that are guarded, by partials in its `vars`.
GUARDED = ("_apply", "_load_from_state_dict")
#: Integer types by size: a view under which no cast to a float type applies.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_log = logging.getLogger("olq")

Function = Callable[[Tensor], Tensor]


def guard(layer: nn.Module) -> None:
    """Guard the layer's `_apply` and `_load_from_state_dict`. A second time changes nothing."""
    for name, guarded in zip(GUARDED, (_apply, _load_from_state_dict), strict=True):
        if name not in layer.__dict__:
            layer.__dict__[name] = functools.partial(guarded, layer)


def _load_from_state_dict(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    state = state_of(layer)
    if state.open is None:
        raise StateError(
            "A state dict was loaded into a quantized layer without a session.",
            where=state.label or prefix.rstrip(".") or type(layer).__name__,
            found="load_state_dict() of a module that prepare() was not called with: a part of one, or a wrapper",
            need="a load that quantizes what arrives",
            remedy="olq.load(module, state_dict), or load_state_dict() of the prepared model itself",
        )
    type(layer)._load_from_state_dict(layer, state_dict, prefix, *rest)


def _apply(layer: nn.Module, fn: Function, recurse: bool = True) -> nn.Module:
    state = state_of(layer)
    if not state.installed:
        _check_no_shadow(layer, state)
        _cast_load_format(layer, state, fn)
    mine = {
        name
        for name in layer._parameters
        if (_is_kernel(name, state) if state.installed else name in state.plans)
    }
    tags = {name + FORMAT_SUFFIX for name in state.plans}
    with_memory = _take_out(layer._parameters, mine), _take_out(layer._buffers, tags)
    try:
        type(layer)._apply(layer, fn, recurse)
    finally:
        _put_back(layer._parameters, with_memory[0])
        _put_back(layer._buffers, with_memory[1])
    held = {name: layer._parameters[name] for name in mine} if state.installed else state.kernel
    device = _move(cast("dict[str, Tensor]", held), state, fn)
    if device is not None:
        for name in tags & layer._buffers.keys():
            layer._buffers[name] = cast("Tensor", layer._buffers[name]).to(device)
    return layer


def _check_no_shadow(layer: nn.Module, state: LayerState) -> None:
    if state.live:
        raise StateError(
            "A layer can't be moved or cast while a shadow load of it is open.",
            where=state.label or type(layer).__name__,
            found="an open load beside the weights that serve",
            need="a move before the load begins, or after its commit or abort",
            remedy="commit or abort the session first",
        )


def _take_out(tensors: dict[str, Any], names: set[str]) -> list[tuple[str, Any]]:
    """Hide some of a module's tensors; what is left keeps its order.

    Returns:
        All of them as they were, for `_put_back`.
    """
    before = list(tensors.items())
    for name in names & tensors.keys():
        del tensors[name]
    return before


def _put_back(tensors: dict[str, Any], before: list[tuple[str, Any]]) -> None:
    others = dict(tensors)
    tensors.clear()
    tensors.update({name: others.get(name, tensor) for name, tensor in before})


def _move(tensors: dict[str, Tensor], state: LayerState, fn: Function) -> torch.device | None:
    """Take kernel tensors along, byte for byte.

    Returns:
        Their new device, or None if they stay.
    """
    probe = fn(torch.empty(0, dtype=torch.uint8, device=state.device)).device
    if probe == state.device or probe.type == "meta":
        for tensor in tensors.values():  # for what acts in place, such as share_memory(); casts skip integers
            fn(tensor.detach().view(_INTEGER[tensor.element_size()]))
        return None
    if tensors:
        _log.warning(
            "%s: kernel tensors moved from %s to %s; captured graphs and saved addresses are invalid",
            state.label or "a quantized layer",
            state.device,
            probe,
        )
    state.made.clear()  # or the old memory would stay
    for tensor in tensors.values():
        tensor.data = tensor.detach().to(probe)
    state.device = probe
    if state.open is not None:
        for weight in state.open.weights.values():
            weight.device = probe
    return probe


def _cast_load_format(layer: nn.Module, state: LayerState, fn: Function) -> None:
    """Let a cast change what the load format is, as long as nothing depends on it."""
    method = cast("QuantMethod", layer.__dict__["quant_method"])
    for name, plan in state.plans.items():
        dtype = fn(torch.empty(0, dtype=plan.dtype, device=state.device)).dtype
        if dtype == plan.dtype or state.kernel:
            continue  # of a model that was live, the load format is what its kernel tensors were made for
        if state.open is not None:
            raise StateError(
                "A layer can't be cast while its weights are being loaded.",
                where=f"{state.label or type(layer).__name__}.{name}",
                found=f"a cast from {plan.dtype} to {dtype} in an open load",
                need="a cast before the load begins, or after its commit",
                remedy="call model.to(dtype) first, then load",
            )
        if dtype not in LOAD_DTYPES:
            raise LayoutError(
                "A layer's weights can't be loaded in this dtype.",
                where=f"{state.label or type(layer).__name__}.{name}",
                found=f"a cast of the load format to {dtype}",
                need="bfloat16, float16 or float32",
                remedy="load first: a live layer leaves its kernel tensors alone and computes in the input's dtype",
            )
        state.plans[name] = method.plan(plan.geometry, dtype)
        parameter = state.load_parameters[name]
        # Not `parameter.data = ...`: after an aborted load that is guarded against loaders.
        empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
        Tensor.data.__set__(parameter, empty)  # pyright: ignore[reportAttributeAccessIssue]


def _is_kernel(name: str, state: LayerState) -> bool:
    return any(name == weight + suffix for weight, plan in state.plans.items() for suffix in plan.tensors)
