"""What `linear_gpu` times: quantized weights of one layer, their operators, and their decoding by plain formulas."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import olq.ops  # noqa: F401  (registers the operators)

OPS = torch.ops.olq
SHAPE = (8192, 8192)
ROWS_OF_X = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
FEW, MANY = (1, 16), 4096
"""Rows of x that have targets: of FEW the weight's bytes are the limit, of MANY the product is."""


@dataclass(frozen=True)
class Case:
    """One format.

    Args:
        name: of the format.
        operator: that multiplies.
        quantize: a bfloat16 weight [N, K] to kernel tensors.
        rest: what follows the tensors, bias, parts and starts.
        decode: kernel tensors to float32 by the format's formula.
        share: least share of the time of reading codes and scales at the rate of a copy, at `FEW` rows.
        speed: least speed as a multiple of a bfloat16 linear's at `MANY` rows.
    """

    name: str
    operator: str
    quantize: Callable[[Tensor], tuple[Tensor, ...]]
    rest: tuple[object, ...]
    decode: Callable[..., Tensor]
    share: float
    speed: float

    def call(self, x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        """`x @ W.T`."""
        n = tensors[0].shape[0]
        return getattr(OPS, self.operator)(x, *tensors, None, [n], [0], *self.rest)


def _u8(w: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=w.device)


def _fp8(w: Tensor) -> tuple[Tensor, ...]:
    codes, scale = _u8(w, *w.shape), torch.empty(len(w), 1, device=w.device)
    OPS.quantize_fp8_(w, codes, scale, 1, 0, False)
    return codes, scale


def _mxfp8(w: Tensor) -> tuple[Tensor, ...]:
    codes, scale = _u8(w, *w.shape), _u8(w, len(w), w.shape[1] // 32)
    OPS.quantize_mxfp8_(w, codes, scale, "RCEIL", "linear", 0, 1, 0)
    return codes, scale


def _nvfp4(w: Tensor) -> tuple[Tensor, ...]:
    n, k = w.shape
    codes, scale, scale_2 = _u8(w, n, k // 2), _u8(w, n, k // 16), torch.empty(1, device=w.device)
    OPS.nvfp4_tensor_scale_(w, scale_2[0])
    OPS.quantize_nvfp4_(w, codes, scale, scale_2[0], "linear", 0, 1, 0)
    return codes, scale, scale_2


def _e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _mxfp8_decoded(codes: Tensor, scale: Tensor) -> Tensor:
    return _e4m3(codes) * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


def _nvfp4_decoded(codes: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    values = torch.cat([values, -values])
    w = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], -1).flatten(-2)
    return w * _e4m3(scale).repeat_interleave(16, 1) * scale_2


CASES = (
    Case("fp8 channel", "matmul_fp8", _fp8, (1, 0), lambda codes, scale: _e4m3(codes) * scale, 0.80, 0.85),
    Case("mxfp8", "matmul_mxfp8", _mxfp8, ("linear",), _mxfp8_decoded, 0.75, 0.85),
    Case("nvfp4", "matmul_nvfp4", _nvfp4, ("linear",), _nvfp4_decoded, 0.65, 0.85),
)
