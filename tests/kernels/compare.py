"""Kernels against the reference on a CPU, on bytes; outputs start as poison.

On a GPU a call is made twice: the second is launched without Triton's front, from what the first left. On a CPU the
kernels run under Triton's interpreter, in a process of their own (test_interpreter).
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from numerics.cases import OPS, first_difference, poison
from olq import kernels
from olq.kernels.launching import interpreted
from olq.numerics import fp8

INTERPRETED = pytest.mark.skipif(not interpreted(), reason="runs in test_interpreter")
_MARKS = {
    "cpu": INTERPRETED,
    "cuda": pytest.mark.cuda,
}
DEVICES = pytest.mark.parametrize("device", [pytest.param(d, marks=m) for d, m in _MARKS.items()])


def cases(some: Sequence[tuple[object, ...]], *every: Sequence[object]) -> list[object]:
    """Some cases for the interpreter, which takes its time; these and all combinations for a GPU; last, the device."""
    found = {"cpu": some, "cuda": dict.fromkeys([*some, *itertools.product(*every)])}
    return [pytest.param(*case, d, marks=m) for d, m in _MARKS.items() for case in found[d]]


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
OUTPUTS = {
    "dequantize_fp8_": (2,),
    "dequantize_mxfp8_": (2,),
    "dequantize_nvfp4_": (3,),
    "nvfp4_tensor_scale_": (1,),
    "scale_product_": (4,),
}


def like(t: Tensor, device: str) -> Tensor:
    """The same values in the same strides on a device; on a CPU the tensor itself."""
    if device == "cpu" or not t.numel():
        return t.to(device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,)).to(device).as_strided(t.shape, t.stride(), 0)


def difference(
    operator: str, args: tuple[object, ...], device: str, outputs: tuple[int, ...] | None = None
) -> str | None:
    """None if the kernels write what the reference writes; else the first difference, or that no kernel ran."""
    outputs = outputs or OUTPUTS.get(operator, (1, 2))
    want = [a.clone() if isinstance(a, Tensor) else a for a in args]
    getattr(OPS, operator)(*want)
    args = tuple(like(a, device) if isinstance(a, Tensor) else a for a in args)
    path = kernels.path(operator, *args)
    if not path.kernels:
        return str(path)
    for call in ("first call", "replayed") if device == "cuda" else ("interpreted",):
        if device == "cpu":
            with np.errstate(all="ignore"):
                kernels.launch(operator, args)
        else:
            getattr(OPS, operator)(*args)
        for i in outputs:
            found = first_difference(args[i].cpu().contiguous(), want[i].contiguous())
            if found:
                return f"{path}, {call}, argument {i}: {found}"
    return None


def assert_equal(
    operator: str, args: tuple[object, ...], device: str, outputs: tuple[int, ...] | None = None
) -> None:
    found = difference(operator, args, device, outputs)
    assert found is None, found


def fp8_call(w: Tensor, block, power_of_two=False, through=None, saturate=False):
    scale = poison(*fp8.scale_shape(w.shape, block), dtype=torch.float32)
    return "quantize_fp8_", (w, poison(*w.shape), scale, *block, power_of_two, through, saturate)


def mxfp8_call(w: Tensor, rule="RCEIL", layout="linear", through=None, saturate=False):
    *lead, n, k = w.shape
    shape, place = ((n, -(-k // 32)), (0, 1, 0)) if layout == "linear" else padded(n, k, 32)
    scale = poison(*lead, *shape)
    return "quantize_mxfp8_", (w, poison(*w.shape), scale, rule, layout, *place, through, saturate)


def nvfp4_call(w: Tensor, scale_2: Tensor | float, layout="linear", through=None, saturate=False):
    *lead, n, k = w.shape
    shape, place = ((n, -(-k // 16)), (0, 1, 0)) if layout == "linear" else padded(n, k, 16)
    if not isinstance(scale_2, Tensor):
        scale_2 = torch.full(lead, scale_2)
    codes, scale = poison(*lead, n, -(-k // 2)), poison(*lead, *shape)
    return "quantize_nvfp4_", (w, codes, scale, scale_2, layout, *place, through, saturate)


def nvfp4_scale_call(w: Tensor, through=None, saturate=False):
    return "nvfp4_tensor_scale_", (w, poison(*w.shape[:-2], dtype=torch.float32), through, saturate)


def padded(n: int, k: int, block: int):
    """A swizzled place that is part of a larger weight: its shape, and (row, row step, column)."""
    return (-(-(2 * n + 1) // 128) * 128, -(-(-(-k // block) + 1) // 4) * 4), (1, 2, 1)


def all_calls(w: Tensor, blocks, rules=("RCEIL",), **reading):
    """Every quantizing operator on one weight; powers of two for the first block."""
    yield fp8_call(w, blocks[0], True, **reading)
    for block in blocks:
        yield fp8_call(w, block, False, **reading)
    for rule in rules:
        yield mxfp8_call(w, rule, **reading)
    yield mxfp8_call(w, layout="swizzled_128x4", **reading)
    yield nvfp4_scale_call(w, **reading)
    scale_2 = torch.empty(w.shape[:-2])
    OPS.nvfp4_tensor_scale_(w, scale_2, *reading.values())
    yield nvfp4_call(w, scale_2, **reading)
    yield nvfp4_call(w, scale_2, "swizzled_128x4", **reading)


def assert_all(w: Tensor, device: str, blocks=((1, 0), (0, 0)), rules=("RCEIL",), **reading) -> None:
    for operator, args in all_calls(w, blocks, rules, **reading):
        assert_equal(operator, args, device)


def weight(*shape: int, dtype=torch.bfloat16, seed=0) -> Tensor:
    """Rows whose magnitudes differ by powers of two; a row of zeros, and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-14, 4, (*shape[:-1], 1), generator=generator).float()
    w = torch.randn(shape, generator=generator) * torch.exp2(rows)
    w[..., shape[-2] // 2, :] = 0.0
    w[..., 0, : min(3, shape[-1])] = -0.0
    return w.to(dtype)


def bit_patterns(*shape: int, dtype=torch.bfloat16, seed=0, finite=True) -> Tensor:
    """Every kind of number: subnormal, huge, and unless `finite` a few infinities and NaNs."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    w = raw.view(dtype).squeeze(-1)
    rare = torch.rand(shape, generator=generator) < 0.01
    w = torch.where(torch.isfinite(w) | (rare & (not finite)), w, torch.ones_like(w))
    if not finite:
        w[..., 1, 1], w[..., 2, 2], w[..., 2, 3] = torch.nan, torch.inf, -torch.inf
    return w
