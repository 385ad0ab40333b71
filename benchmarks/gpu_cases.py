"""What `quantize_gpu` times: one case a format, as data. How it is timed is in the runner.

Each case holds two ways to the same format: olq's operators into storage that exists, as a load uses them; and the
format's formula in plain torch, whole tensor at once. The operators must equal the formula byte for byte, and the
peer is the formula compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import olq.ops  # noqa: F401  (registers the operators)

OPS = torch.ops.olq
LARGE, SMALL = (28672, 8192), (4096, 4096)
"""Far beyond a cache; and within an H200's, where launching counts."""

SCRATCH_BOUND = 8192
"""Bytes that an operator may take besides its results."""

SPEEDUP = 1.5
"""Target of the ratio to the compiled formula on `SMALL`, launching included."""

Calls = tuple[tuple[str, tuple[object, ...]], ...]


@dataclass(frozen=True)
class Case:
    """One format.

    Args:
        name: what is quantized to.
        bytes_an_element: of a bfloat16 weight read, and of codes and scales written; the least traffic.
        target: least share of a plain copy's rate on `LARGE`.
        outputs: makes the results' storage for a weight [N, K].
        calls: operators and their arguments, given the weight and the results.
        plain: the results by the formula.
    """

    name: str
    bytes_an_element: float
    target: float
    outputs: Callable[[Tensor], tuple[Tensor, ...]]
    calls: Callable[..., Calls]
    plain: Callable[[Tensor], tuple[Tensor, ...]]

    def run(self, w: Tensor, *outputs: Tensor) -> None:
        """Write the results."""
        for operator, args in self.calls(w, *outputs):
            getattr(OPS, operator)(*args)


def weight(shape: tuple[int, int], device: str) -> Tensor:
    """A bfloat16 weight as a trained model has them: normal, 0.02; the same each time on a device."""
    w = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return w.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(0))


def _u8(w: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=w.device)


def _f32(w: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=w.device)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


# -- fp8 ----------------------------------------------------------------------------------------------------


def _fp8_scale(amax: Tensor) -> Tensor:
    # By a tensor: eager CUDA turns a division by a number into a product.
    return (amax / torch.full_like(amax, 448)).clamp(min=2.0**-126).masked_fill(amax == 0, 1.0)


def _fp8(block: tuple[int, int]) -> Callable[..., Calls]:
    return lambda w, codes, scale: (("quantize_fp8_", (w, codes, scale, *block, False)),)


def _channel_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float()
    scale = _fp8_scale(x.abs().amax(-1, keepdim=True))
    return _e4m3(x * (torch.ones_like(scale) / scale)), scale


def _tensor_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float()
    scale = _fp8_scale(x.abs().amax().view(1, 1))
    return _e4m3(x * (torch.ones_like(scale) / scale)), scale


def _block_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float().unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    scale = _fp8_scale(x.abs().amax((1, 3), keepdim=True))
    return _e4m3(x * (torch.ones_like(scale) / scale)).view(w.shape), scale[:, 0, :, 0]


# -- mxfp8 --------------------------------------------------------------------------------------------------


def _mxfp8(w: Tensor, codes: Tensor, scale: Tensor) -> Calls:
    return (("quantize_mxfp8_", (w, codes, scale, "RCEIL", "linear", 0, 1, 0)),)


def _mxfp8_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float().unflatten(-1, (-1, 32))
    bits = x.abs().amax(-1).view(torch.int32)
    byte = (((bits + 0x1FFFFF) >> 23) - 8).clamp(0, 253)
    factor = ((254 - byte) << 23).view(torch.float32)
    return _e4m3(x * factor[..., None]).flatten(-2), byte.to(torch.uint8)


# -- nvfp4 --------------------------------------------------------------------------------------------------


def _nvfp4_given(w: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor) -> Calls:
    return (("quantize_nvfp4_", (w, codes, scale, scale_2, "linear", 0, 1, 0)),)


def _nvfp4(w: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor) -> Calls:
    return (("nvfp4_tensor_scale_", (w, scale_2)), *_nvfp4_given(w, codes, scale, scale_2))


_GIVEN = 2.0**-14


def _nvfp4_codes(w: Tensor, scale_2: Tensor) -> tuple[Tensor, ...]:
    x = w.float().unflatten(-1, (-1, 16))
    amax = x.abs().amax(-1)
    block = (amax / (6 * scale_2).expand_as(amax)).clamp(max=448).to(torch.float8_e4m3fn)
    step = block.float() * scale_2
    factor = (torch.ones_like(step) / step).masked_fill(step == 0, 0.0)
    y = (x * factor[..., None]).flatten(-2)
    # The middles between neighbouring values; of two equally near ones the even code wins.
    a, code = y.abs(), torch.signbit(y).to(torch.uint8) << 3
    for middle in (0.25, 1.25, 2.5, 5.0):
        code = code + (a > middle).to(torch.uint8)
    for middle in (0.75, 1.75, 3.5):
        code = code + (a >= middle).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, block.view(torch.uint8), scale_2


def _nvfp4_plain(w: Tensor) -> tuple[Tensor, ...]:
    amax = w.abs().amax().float()
    return _nvfp4_codes(w, amax / torch.full_like(amax, 2688))


def _nvfp4_given_plain(w: Tensor) -> tuple[Tensor, ...]:
    return _nvfp4_codes(w, torch.full((), _GIVEN, device=w.device))


def _nvfp4_outputs(w: Tensor) -> tuple[Tensor, ...]:
    n, k = w.shape
    return _u8(w, n, k // 2), _u8(w, n, k // 16), torch.full((), _GIVEN, device=w.device)


def _fp8_outputs(*grid: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """`grid`: elements a unit along each dimension, 0 for all."""

    def make(w: Tensor) -> tuple[Tensor, ...]:
        units = [extent // size if size else 1 for extent, size in zip(w.shape, grid, strict=True)]
        return _u8(w, *w.shape), _f32(w, *units)

    return make


CASES = (
    Case("fp8 channel", 3.0, 0.90, _fp8_outputs(1, 0), _fp8((1, 0)), _channel_plain),
    Case("fp8 block", 3.0, 0.90, _fp8_outputs(128, 128), _fp8((128, 128)), _block_plain),
    Case("fp8 tensor", 5.0, 0.85, _fp8_outputs(0, 0), _fp8((0, 0)), _tensor_plain),
    Case(
        "mxfp8",
        3.0 + 1 / 32,
        0.90,
        lambda w: (_u8(w, *w.shape), _u8(w, len(w), w.shape[1] // 32)),
        _mxfp8,
        _mxfp8_plain,
    ),
    Case("nvfp4, scale given", 2.5 + 1 / 16, 0.75, _nvfp4_outputs, _nvfp4_given, _nvfp4_given_plain),
    Case("nvfp4", 4.5 + 1 / 16, 0.70, _nvfp4_outputs, _nvfp4, _nvfp4_plain),
)
