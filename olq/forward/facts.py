"""What a path is chosen by and computes from: a live weight, and one call.

Letters   M = rows of x (tokens), N = rows of the weight, K = columns of both; R, C = rows and columns of the codes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Decoded = Callable[[torch.dtype, torch.device], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, slots=True)
class Weight:
    """One live weight, as paths read it. Nothing is copied: a reload writes into the same tensors.

    Args:
        label: the layer and the weight, for messages.
        method: the method's name.
        params: the method's parameters.
        lead: leading (expert) dimensions.
        parts: logical rows of each part of a fused layer; N is their sum.
        starts: first row of each part in the kernel format.
        columns: K.
        block: rows and columns of the elements that share a scale; 0 is the part's whole extent.
        tensors: kernel tensors by suffix: "" holds the codes, [*lead, R, C] bytes.
        decoded: called with a dtype and a device, gives (first logical row, decoded rows [n, K]) of bands that
            follow each other and are all rows.
    """

    label: str
    method: str
    params: Any
    lead: tuple[int, ...]
    parts: tuple[int, ...]
    starts: tuple[int, ...]
    columns: int
    block: tuple[int, int]
    tensors: Mapping[str, Tensor]
    decoded: Decoded

    @property
    def rows(self) -> int:
        """N."""
        return sum(self.parts)

    @property
    def activations(self) -> str:
        """What shares a scale of quantized activations; "none" where they stay as they are."""
        return getattr(self.params, "activations", "none")

    @property
    def asked(self) -> str:
        """The path that the method's parameters ask for; "auto" leaves it to the table."""
        return getattr(self.params, "path", "auto")

    def matrix(self, x: Tensor) -> Tensor:
        """x [..., K] as [M, K], also where M or K is 0."""
        return x.reshape(x.shape[:-1].numel(), self.columns)

    def parameter(self, name: str) -> str | None:
        """A parameter of the method, None if the method has none of that name."""
        return getattr(self.params, name, None)


@dataclass(frozen=True, slots=True)
class Input:
    """What one call brings, without its values.

    Args:
        device: where the weight is.
        capability: compute capability of a CUDA device, (0, 0) elsewhere.
        dtype: of x.
        tokens: M.
        gradient: what asks for a gradient, in words; None if nothing does.
        bias: dtype of the bias, None without one.
        autocast: whether torch.autocast is on for the device.
    """

    device: torch.device
    capability: tuple[int, int]
    dtype: torch.dtype
    tokens: int
    gradient: str | None
    bias: torch.dtype | None
    autocast: bool


_CAPABILITIES: dict[int, tuple[int, int]] = {}
"""By index of a CUDA device: torch.compile traces a dict, not the driver's answer."""


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, (0, 0) for any other device."""
    if device.type != "cuda":
        return 0, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _CAPABILITIES:
        _CAPABILITIES[index] = torch.cuda.get_device_capability(index)
    return _CAPABILITIES[index]
