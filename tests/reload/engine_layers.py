"""Layers as engines write them, with any loader, and what their kernel tensors have to be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import olq
from olq.alloc import allocate
from olq.methods.state import find_state

Loader = Callable[..., Any]


class OneWeight(nn.Module):
    """One quantized weight whose loader is given; and, if asked for, a bias with a loader of its own.

    Args:
        loader: called as `loader(parameter, *args)`; None stands for a plain copy.
        method: name of a method, `params` its parameters.
        parts: rows of each part.
        columns: K.
        lead: expert dimensions.
        dtype: of the load format.
        bias: "before" or "after" the weight, or "".
        device: where the kernel tensors are made.
    """

    def __init__(
        self,
        loader: Loader | None = None,
        *,
        method: str = "fp8",
        params: dict[str, str] | None = None,
        parts: tuple[int, ...] = (16,),
        columns: int = 32,
        lead: tuple[int, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        bias: str = "",
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.quant_method = olq.get_method(method, **(params or {}))
        if bias == "before":
            self.add_bias(sum(parts), dtype)
        self.quant_method.create_weights(
            self, columns, parts, dtype=dtype, weight_loader=loader, lead=lead, device=device, label="layer"
        )
        if bias == "after":
            self.add_bias(sum(parts), dtype)

    def add_bias(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        """Register a bias of NaN."""
        self.bias = nn.Parameter(torch.full((rows,), float("nan"), dtype=dtype), requires_grad=False)


def weight(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def real_parameter(layer: nn.Module) -> nn.Parameter:
    """What a loader would get without olq: memory of the parameter's shape and dtype, holding NaN."""
    meta = find_state(layer).load_parameters["weight"]
    return nn.Parameter(torch.full(meta.shape, float("nan"), dtype=meta.dtype), requires_grad=False)


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's elements as bytes."""
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())


def whole_bytes(layer: nn.Module, weight: Tensor) -> dict[str, bytes]:
    """Kernel tensors by name if the layer's method is given each part of the whole weight once."""
    plan = find_state(layer).plans["weight"]
    method = layer.quant_method
    tensors = {s: allocate(spec, device="cpu", owner=f"expected{s}") for s, spec in plan.tensors.items()}
    method.write_padding_(tensors, plan)
    for part, rows in enumerate(weight.split(plan.geometry.parts, dim=-2)):
        method.quantize_(rows, tensors, plan, plan.whole(part))
    return {"weight" + suffix: bytes_of(tensor) for suffix, tensor in tensors.items()}


def stored_bytes(layer: nn.Module) -> dict[str, bytes]:
    """Kernel tensors of a live layer by name."""
    plan = find_state(layer).plans["weight"]
    return {"weight" + suffix: bytes_of(getattr(layer, "weight" + suffix)) for suffix in plan.tensors}


def load(layer: nn.Module, *calls: tuple[Any, ...], name: str = "weight") -> nn.Module:
    """Open a layer, call its weight's loader once with each tuple of arguments, and finish."""
    olq.initialize_online_processing(layer)
    for args in calls:
        call(layer, *args, name=name)
    olq.finalize_layerwise_processing(layer)
    return layer


def call(layer: nn.Module, *args: Any, name: str = "weight") -> Any:
    """Call a parameter's loader as an engine does."""
    parameter = layer.get_parameter(name)
    return parameter.weight_loader(parameter, *args)


class OwnLoop(nn.Module):
    """A model that loads through a loop of its own, as engines do: quantized layers, and a norm of float32."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OneWeight(lambda p, x: p.copy_(x)) for _ in range(count)])
        self.norm = nn.Parameter(torch.full((8,), float("nan")), requires_grad=False)

    def load_weights(self, weights) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", lambda p, x: p.data.copy_(x))(parameter, tensor)
