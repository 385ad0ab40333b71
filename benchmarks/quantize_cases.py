"""What `quantize_cpu` times: one case a format, as data. How it is timed is in the runner.

Each case holds three ways to the same format: olq's operator into storage that exists, as a load uses it; the
format's formula written down in plain torch, whole tensor at once, which the operator must equal byte for byte; and
the eager call of torchao, which has its own numerics and makes its own results.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import olq.ops  # noqa: F401  (registers the operators)

OPS = torch.ops.olq
SHAPES = {"4096x4096": (4096, 4096), "14336x4096": (14336, 4096)}
"""Out and in features of a square projection and of an MLP's gate in an 8B Llama."""

SCRATCH_BOUND = 8_000_000
"""Bytes that an operator may take besides its results, whatever the size of the weight."""


@dataclass(frozen=True)
class Case:
    """One format.

    Args:
        name: what is quantized to.
        peer: the call that it is compared with, as text.
        target: how many times faster than the peer it has to be.
        bytes_an_element: of a bfloat16 weight read and of codes and scales written; the least traffic.
        outputs: makes the results' storage for a weight [N, K].
        run: writes the results.
        plain: the results by the formula.
        load_peer: imports the peer and returns its call on a weight.
    """

    name: str
    peer: str
    target: float
    bytes_an_element: float
    outputs: Callable[[Tensor], tuple[Tensor, ...]]
    run: Callable[..., None]
    plain: Callable[[Tensor], tuple[Tensor, ...]]
    load_peer: Callable[[], Callable[[Tensor], object]]


def weight(shape: tuple[int, int]) -> Tensor:
    """A bfloat16 weight as a trained model has them: normal, 0.02; the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()


def _u8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


# -- fp8, one float32 scale a row ----------------------------------------------------------------


def _fp8_run(w: Tensor, codes: Tensor, scale: Tensor) -> None:
    OPS.quantize_fp8_(w, codes, scale, 1, 0, False)


def _fp8_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / torch.full_like(amax, 448)).clamp(min=2.0**-126).masked_fill(amax == 0, 1.0)
    return _e4m3(x * (torch.ones_like(scale) / scale)), scale


def _fp8_peer() -> Callable[[Tensor], object]:
    from torchao.quantization import Float8Tensor, PerRow

    return lambda w: Float8Tensor.from_hp(w, granularity=PerRow())


# -- mxfp8, least exponent without saturation ----------------------------------------------------


def _mxfp8_run(w: Tensor, codes: Tensor, scale: Tensor) -> None:
    OPS.quantize_mxfp8_(w, codes, scale, "RCEIL", "linear", 0, 1, 0)


def _mxfp8_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float().unflatten(-1, (-1, 32))
    fraction, exponent = torch.frexp(x.abs().amax(-1))  # 448 = 0.875 * 2 ** 9
    exponent = (exponent - 9 + (fraction > 0.875)).clamp(-127, 127).masked_fill(fraction == 0, -127)
    return _e4m3(torch.ldexp(x, -exponent[..., None])).flatten(-2), (exponent + 127).to(torch.uint8)


def _mxfp8_peer() -> Callable[[Tensor], object]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode.RCEIL
    return lambda w: to_mx(w, torch.float8_e4m3fn, 32, scaling_mode=mode)


# -- nvfp4, tensor scale included ----------------------------------------------------------------


def _nvfp4_run(w: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor) -> None:
    OPS.nvfp4_tensor_scale_(w, scale_2)
    OPS.quantize_nvfp4_(w, codes, scale, scale_2, "linear", 0, 1, 0)


def _nvfp4_plain(w: Tensor) -> tuple[Tensor, ...]:
    x = w.float().unflatten(-1, (-1, 16))
    scale_2 = x.abs().amax() / torch.tensor(2688.0)
    amax = x.abs().amax(-1)
    block = (amax / (6 * scale_2).expand_as(amax)).clamp(max=448).to(torch.float8_e4m3fn)
    step = block.float() * scale_2
    factor = (torch.ones_like(step) / step).masked_fill(step == 0, 0.0)
    y = (x * factor[..., None]).flatten(-2)
    # The middles between neighbouring values; of two equally near ones the even code wins.
    up = torch.bucketize(y.abs(), torch.tensor([0.25, 1.25, 2.5, 5.0]), right=False)
    up += torch.bucketize(y.abs(), torch.tensor([0.75, 1.75, 3.5]), right=True)
    code = up.to(torch.uint8) | (torch.signbit(y).to(torch.uint8) << 3)
    return code[:, 0::2] | code[:, 1::2] << 4, block.view(torch.uint8), scale_2


def _nvfp4_peer() -> Callable[[Tensor], object]:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return lambda w: NVFP4Tensor.to_nvfp4(w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().amax()))


CASES = (
    Case(
        name="fp8 per channel",
        peer="torchao Float8Tensor.from_hp(PerRow)",
        target=4.0,
        bytes_an_element=3.0,
        outputs=lambda w: (_u8(*w.shape), torch.empty(len(w), 1)),
        run=_fp8_run,
        plain=_fp8_plain,
        load_peer=_fp8_peer,
    ),
    Case(
        name="mxfp8",
        peer="torchao to_mx(RCEIL)",
        target=4.0,
        bytes_an_element=3.0 + 1 / 32,
        outputs=lambda w: (_u8(*w.shape), _u8(len(w), w.shape[1] // 32)),
        run=_mxfp8_run,
        plain=_mxfp8_plain,
        load_peer=_mxfp8_peer,
    ),
    Case(
        name="nvfp4",
        peer="torchao NVFP4Tensor.to_nvfp4",
        target=4.0,
        bytes_an_element=2.5 + 1 / 16,
        outputs=lambda w: (_u8(len(w), w.shape[1] // 2), _u8(len(w), w.shape[1] // 16), torch.empty(())),
        run=_nvfp4_run,
        plain=_nvfp4_plain,
        load_peer=_nvfp4_peer,
    ),
)
