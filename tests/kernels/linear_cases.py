"""Quantized weights for products, made of drawn bytes and decoded by the oracles; what lies beside one is poison."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from kernels.compare import like
from torch import Tensor

from numerics.cases import OPS
from olq import kernels
from olq.kernels import plans
from olq.kernels.shapes import Plan
from oracles import fp8, kernel_format, mxfp8, nvfp4

POISON = 0xFF
"""As an E4M3 code or scale, and as an E8M0 scale, not a number."""

_NONE = np.empty((0, 0), np.float32)
"""For who asks only about plans: oracles take their time."""

FORMATS = (
    "fp8 tensor",
    "fp8 channel",
    "fp8 block",
    "fp8 group",
    "fp8 columns",
    "mxfp8 linear",
    "mxfp8 swizzled_128x4",
    "nvfp4 linear",
    "nvfp4 swizzled_128x4",
)
_BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128), "group": (1, 64), "columns": (0, 64)}


@dataclass(frozen=True)
class Weight:
    """Operator, its arguments but x and bias, and the decoded weight, float32 [N, K]."""

    operator: str
    tensors: tuple[Tensor, ...]
    parts: list[int]
    starts: list[int]
    rest: tuple[object, ...]
    decoded: np.ndarray

    def args(self, x: Tensor, bias: Tensor | None) -> tuple[object, ...]:
        return (x, *self.tensors, bias, self.parts, self.starts, *self.rest)

    def as_dtype(self, dtype: torch.dtype) -> Tensor:
        """The weight as an operand: one more rounding."""
        return torch.from_numpy(self.decoded).to(dtype)

    def by_kernel(self, x: Tensor, bias: Tensor | None) -> bool:
        """Whether a kernel multiplies."""
        out = x.new_empty(len(x), sum(self.parts))
        return isinstance(plans.plan(self.operator, (out, *self.args(x, bias))), Plan)

    def operand(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """What is multiplied: the kernel keeps float32 scales for the sum, so that nothing is rounded before."""
        exact = self.by_kernel(x, bias) and self.operator != "matmul_mxfp8"
        return self.as_dtype(torch.float32 if exact else x.dtype)

    def allowed(self, x: Tensor, bias: Tensor | None, device: str) -> float:
        """Times the bound of `largest_error`: on a GPU torch may add parts of a sum in 16 bits."""
        return 1.0 if device == "cpu" or self.by_kernel(x, bias) else 4.0


def place(parts: list[int], grid: int) -> list[int]:
    starts, end = [], 0
    for rows in parts:
        starts.append(kernel_format.up(end, grid))
        end = starts[-1] + rows
    return starts


def _bytes(generator: np.random.Generator, *shape: int, low: int = 0, high: int = 256) -> np.ndarray:
    return generator.integers(low, high, shape, dtype=np.uint8)


def _e4m3(generator: np.random.Generator, *shape: int) -> np.ndarray:
    codes = _bytes(generator, *shape)
    return np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)


def _poisoned(inner: np.ndarray, shape: tuple[int, ...], where: list[tuple[int, int]]) -> np.ndarray:
    """`inner`, whose rows come in pieces of (start, count), inside poison."""
    out = np.full(shape, POISON, np.uint8) if inner.dtype == np.uint8 else np.full(shape, np.nan, inner.dtype)
    done = 0
    for start, count in where:
        out[start : start + count, : inner.shape[1]] = inner[done : done + count]
        done += count
    return out


def make(
    form: str, parts: list[int], k: int, seed: int = 0, scale: float = 1e-3, decode: bool = True
) -> Weight:
    """A weight of `parts` x k in a format of `FORMATS`: finite codes and scales, all kinds of them."""
    generator = np.random.default_rng(seed)
    kind, way = form.split()
    n = sum(parts)
    if kind == "fp8":
        return _fp8(generator, way, parts, k, scale, decode)
    block = 32 if kind == "mxfp8" else 16
    starts, rows, blocks = place(parts, 1), kernel_format.up(max(n, 1), 16), -(-k // block)
    if kind == "mxfp8":
        codes, bytes_ = _e4m3(generator, n, k), _bytes(generator, n, blocks, low=115, high=122)
        decoded = mxfp8.dequantize(codes, bytes_) if decode else _NONE
        wide = (rows, kernel_format.up(k, 32))
    else:
        codes, bytes_ = _bytes(generator, n, -(-k // 2)), _e4m3(generator, n, blocks)
        s2 = (generator.random(len(parts)) + 0.5).astype(np.float32) * np.float32(scale)
        edges = np.cumsum([0, *parts])
        pieces = [slice(a, b) for a, b in pairwise(edges)]
        decoded = [
            nvfp4.dequantize(codes[p], bytes_[p], s, k) if decode else _NONE
            for p, s in zip(pieces, s2, strict=True)
        ]
        decoded = np.concatenate(decoded)
        wide = (rows, kernel_format.up(k, 32) // 2)
    if way == "linear":
        width = kernel_format.up(k, 32) // block
        stored = _poisoned(bytes_, (rows, width), [(0, n)])
    else:
        stored = kernel_format.swizzle(bytes_) if n else np.zeros((0, kernel_format.up(blocks, 4)), np.uint8)
        places = kernel_format.swizzle(np.ones_like(bytes_)) if n else stored
        stored[places == 0] = POISON  # that padding is 0 is for other readers
    tensors = [_poisoned(codes, wide, [(0, n)]), stored]
    if kind == "nvfp4":
        tensors.append(s2)
    return Weight(f"matmul_{kind}", tuple(map(torch.from_numpy, tensors)), parts, starts, (way,), decoded)


def _fp8(
    generator: np.random.Generator, way: str, parts: list[int], k: int, scale: float, decode: bool
) -> Weight:
    block = _BLOCKS[way]
    starts = place(parts, max(block[0], 1))
    rows = kernel_format.up(max(starts[-1] + parts[-1], 1), 16)
    codes = _e4m3(generator, sum(parts), k)
    decoded, grids, edge = [], [], 0
    for part, start in zip(parts, starts, strict=True):
        grid = (-(-part // block[0]) if block[0] else 1, -(-k // block[1]) if block[1] else 1)
        s = (generator.random(grid) + 0.5).astype(np.float32) * np.float32(scale)
        decoded.append(fp8.dequantize(codes[edge : edge + part], s, block) if decode else _NONE)
        grids.append((start // block[0] if block[0] else len(grids), s))
        edge += part
    if way == "tensor":
        stored = np.array([s[0, 0] for _, s in grids], np.float32)
    else:
        height = max(first + len(s) for first, s in grids)
        stored = np.full((height, grids[0][1].shape[1]), np.nan, np.float32)
        for first, s in grids:
            stored[first : first + len(s)] = s
    wide = _poisoned(codes, (rows, kernel_format.up(k, 16)), list(zip(starts, parts, strict=True)))
    tensors = (torch.from_numpy(wide), torch.from_numpy(stored))
    return Weight("matmul_fp8", tensors, parts, starts, block, np.concatenate(decoded))


def product(weight: Weight, x: Tensor, bias: Tensor | None, device: str) -> Tensor:
    """By the kernel on a CPU, interpreted; on a GPU by the operator, twice. What has no kernel goes its other way."""
    args = tuple(like(a, device) if isinstance(a, Tensor) else a for a in weight.args(x, bias))
    if device == "cpu":
        out = torch.full((len(x), sum(weight.parts)), torch.nan, dtype=x.dtype)
        with np.errstate(all="ignore"):
            if not kernels.launch(weight.operator, args, (out,)):
                return getattr(OPS, weight.operator)(*args)
        return out
    first, second = (getattr(OPS, weight.operator)(*args).cpu() for _ in range(2))
    assert torch.equal(first.view(torch.int16), second.view(torch.int16)), "two calls differ"
    return first


def largest_error(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> float:
    """The largest error as a multiple of what sums in float32 allow; x and w are the operands themselves.

    A sum of K exact products, each step of which loses at most 2**-22 of its size (tensor cores cut where they should
    round), errs by at most K * 2**-22 * sum |x| |w|; then y is rounded once to its dtype.
    """
    x64, w64 = x.double(), w.double()
    want, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    half_step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[y.dtype]
    bound = (x.shape[1] + 1) * 2.0**-22 * size * (1 + half_step) + want.abs() * half_step + 1e-7
    return float(((y.double() - want).abs() / bound).max()) if y.numel() else 0.0
