"""Uniform values that depend on (seed, name, index) alone: rule `olq-uniform-1`.

    w = mix(i >> 1)                            one 32-bit word for two neighbours
    t = low half (i even) or high half (i odd) of w, a signed 16-bit integer
    x = clamp(centre + t * step, low, high)    float32; then rounded to the tensor's dtype

i         index of the element in the unsharded tensor, row-major. So neither chunks, layout, device nor
          tensor-parallel size can change a value, and the old ones are never read.
Exact     `step` has 8 significant bits, so t * step has no rounding: a kernel may fuse it with the addition.
Integers  32 bits, modulo 2**32. Torch has no unsigned shift: an arithmetic one and a mask stand in for it.
Spec      docs/formats/dummy.md, with the reasons for this mix and its measured quality.
Scratch   0.6 MiB on a CPU, 20 MiB on another device, whatever the tensor's size; none where a kernel fills.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from olq.errors import ConfigError, LayoutError
from olq.layout import contiguous_strides, overlaps
from olq.numerics.indexed import Dim, cut

RULE = "olq-uniform-1"
"""Enters every key: a rule with other values gets another name."""

WORDS = 1 << 15
"""Words of one box on a CPU: they and their helper stay in a core's second-level cache, and no operation is large
enough for torch to start its threads, which would wait for each other at every step on a busy machine. Read
when a device is first used, so that tests can make it small."""

_GAMMA = 0x9E3779B9
_FACTORS = (0x7FEB352D, 0x846CA68B)

_WORD = 0xFFFFFFFF
_ANY = 1 << 62  # words: a box is as large as its tensor, but for what `cut` promises

Numbers = tuple[float, float, float, float, bool]
"""step, centre, low, high; and whether values are clamped."""

Kernel = Callable[[Tensor, Numbers, Iterator[tuple[Sequence[Dim], int, int, int, int]]], bool]
"""Fills a tensor whose boxes it is given: dimensions, first index, its place in the storage, two keys. False if it
can't, and then it has taken none."""


class UniformFill:
    """Fills tensors with values between two bounds.

    Args:
        low: lower bound, rounded to float32.
        high: upper bound, likewise.
        seed: any integer.
        kernel: what is asked first to fill a tensor: `olq.kernels.fill_uniform`.

    Raises:
        ConfigError: a bound is not finite in float32, or `low` is above `high`.
    """

    def __init__(self, low: float, high: float, seed: int, kernel: Kernel | None = None) -> None:
        self.low, self.high, self.seed = _float32(low), _float32(high), seed
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ConfigError(
                "These bounds hold no range of values.",
                where="low and high of a uniform fill",
                found=f"low={low!r}, high={high!r}",
                need="finite float32 numbers, low not above high",
                remedy="give the smaller one first",
            )
        self.centre, self.step = _float32((self.low + self.high) / 2), _step(self.low, self.high)
        reached = [_float32(self.centre + t * self.step) for t in (-32768, 32767)]
        self._clamps = reached[0] < self.low or reached[1] > self.high
        self._kernel = kernel
        self._buffers: dict[torch.device, _Buffers] = {}

    def fill_(
        self,
        out: Tensor,
        name: str,
        shape: Sequence[int] | None = None,
        offset: Sequence[int] | None = None,
    ) -> None:
        """Fill a tensor, or the local piece of a larger one.

        Args:
            out: a floating type that torch can cast to; any strides without overlap, any device.
            name: what makes its values different from another tensor's.
            shape: of the unsharded tensor, if `out` is a box of it.
            offset: of the box in it.

        Raises:
            LayoutError: the bounds are outside the dtype's range, elements share memory, or the box does not lie
                inside `shape`.
        """
        shape = tuple(out.shape) if shape is None else tuple(shape)
        offset = (0,) * out.dim() if offset is None else tuple(offset)
        self._check(out, name, shape, offset)
        if out.is_meta or not out.numel():
            return
        strides = contiguous_strides(shape)
        base = sum(o * s for o, s in zip(offset, strides, strict=True))
        with torch.inference_mode(out.is_inference()), torch.no_grad():
            dims = tuple(zip(out.shape, out.stride(), strides, strict=True))
            start = base, int(out.storage_offset())
            if self._kernel is not None:
                boxes = (
                    (box, first, place, *key(self.seed, name, first >> 33))
                    for box, first, place in cut(dims, *start, _ANY)
                )
                numbers = self.step, self.centre, self.low, self.high, self._clamps
                if self._kernel(out, numbers, boxes):
                    return
            buffers = self._buffers_on(out.device)
            for box in cut(dims, *start, buffers.size):
                self._fill_box(out, name, buffers, *box)

    def _fill_box(
        self, out: Tensor, name: str, buffers: "_Buffers", dims: list[Dim], base: int, offset: int
    ) -> None:
        """Write one box: rows whose index steps are even, each a run of neighbours in the index."""
        sizes, strides = [size for size, _, _ in dims], [stride for _, stride, _ in dims]
        first = base >> 1
        views = buffers.views(tuple(sizes), base & 1)
        key_0, key_1 = key(self.seed, name, first >> 32)
        if len(dims) == 1:
            torch.add(views.weyl, _signed(first * _GAMMA + key_0), out=views.words)
        else:
            starts = torch.full(sizes[:-1], first & _WORD, dtype=torch.int64, device=out.device)
            for d, (size, _, step) in enumerate(dims[:-1]):
                steps = torch.arange(size, dtype=torch.int64, device=out.device) * (step // 2)
                starts += steps.view(*(-1 if e == d else 1 for e in range(len(dims) - 1)))
            starts = starts.mul_(_GAMMA).add_(key_0)  # low 32 bits are right even where 64 overflow
            torch.add(views.weyl, _signed_tensor(starts)[..., None], out=views.words)
        _mix(views.words, views.helper, key_1)
        for start, draws, values in views.parts:
            values.copy_(draws).mul_(self.step)
            if self.centre:
                values.add_(self.centre)
            if self._clamps:
                values.clamp_(self.low, self.high)
            out.as_strided(values.shape, strides, offset + start * strides[0]).copy_(values)

    def _buffers_on(self, device: torch.device) -> "_Buffers":
        if device not in self._buffers:
            self._buffers[device] = _Buffers(device)
        return self._buffers[device]

    def _check(self, out: Tensor, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        if len(shape) != out.dim() or len(offset) != out.dim():
            inside = False
        else:
            inside = all(o >= 0 and o + n <= s for o, n, s in zip(offset, out.shape, shape, strict=True))
        if not inside:
            raise LayoutError(
                "This tensor is no box of the unsharded tensor.",
                where=name or "a uniform fill",
                found=f"shape {list(out.shape)} at offset {list(offset)}",
                need=f"a box inside shape {list(shape)}",
                remedy="give the shape before sharding, and this rank's first index in each dimension",
            )
        if not out.is_floating_point() or overlaps(tuple(out.shape), out.stride()):
            raise LayoutError(
                "This tensor can't be filled element by element.",
                where=name or "a uniform fill",
                found=f"{out.dtype}, shape {list(out.shape)}, strides {list(out.stride())}",
                need="a floating type, and no two elements at one place",
                remedy="fill the tensor that it is a view of",
            )
        largest = torch.finfo(out.dtype).max
        if max(-self.low, self.high) > largest:
            raise LayoutError(
                "The bounds are outside what the tensor can hold.",
                where=name or "a uniform fill",
                found=f"low={self.low}, high={self.high}",
                need=f"{-largest} to {largest}, the finite values of {out.dtype}",
                remedy="choose narrower bounds",
            )


class _Views(NamedTuple):
    """A box's share of the scratch: [*rows, width] words, and its values along the first dimension in parts."""

    words: Tensor
    helper: Tensor
    weyl: Tensor
    parts: list[tuple[int, Tensor, Tensor]]


class _Buffers:
    """Scratch of one device, for boxes of `size` words. A tensor has boxes of few shapes, so views are kept."""

    def __init__(self, device: torch.device) -> None:
        cpu = device.type == "cpu"
        self.size = WORDS if cpu else 32 * WORDS  # elsewhere a launch costs more than the arithmetic
        with torch.inference_mode(False):
            self._weyl = torch.arange(self.size, dtype=torch.int32, device=device).mul_(_signed(_GAMMA))
            self._words, self._helper = torch.empty_like(self._weyl), torch.empty_like(self._weyl)
            self._values = torch.empty(2 * self.size, dtype=torch.float32, device=device)
        self._part = self.size if cpu else 2 * self.size
        self._known: dict[tuple[tuple[int, ...], int], _Views] = {}

    def views(self, sizes: tuple[int, ...], odd: int) -> _Views:
        """For a box of `sizes` whose first draw is the `odd` half of its word."""
        found = self._known.get((sizes, odd))
        if found is None:
            if len(self._known) == 64:
                self._known.clear()
            found = self._known[sizes, odd] = self._make(sizes, odd)
        return found

    def _make(self, sizes: tuple[int, ...], odd: int) -> _Views:
        *rows, length = sizes
        width = (odd + length + 1) >> 1
        words, helper = (b[: math.prod(rows) * width].view(*rows, width) for b in (self._words, self._helper))
        draws = words.view(torch.int16)[..., odd : odd + length]
        step = max(self._part // math.prod(sizes[1:]), 1)
        parts = []
        for start in range(0, sizes[0], step):
            some = draws[start : start + step]
            parts.append((start, some, self._values[: some.numel()].view(some.shape)))
        return _Views(words, helper, self._weyl[:width], parts)


@lru_cache(maxsize=64)
def key(seed: int, name: str, block: int) -> tuple[int, int]:
    """The two 32-bit keys of `mix` for words block * 2**32 and up: the first eight bytes of a SHA-256."""
    digest = hashlib.sha256(f"{RULE}\n{seed}\n{block}\n{name}".encode()).digest()
    return struct.unpack_from("<II", digest)


def _mix(x: Tensor, helper: Tensor, key_1: int) -> None:
    """The mix after its first step (word index * gamma + key_0), in place on int32."""
    _fold(x, helper, 16)
    x.mul_(_signed(_FACTORS[0]))
    _fold(x, helper, 15)
    x.bitwise_xor_(_signed(key_1))
    x.mul_(_signed(_FACTORS[1]))
    _fold(x, helper, 16)


def _fold(x: Tensor, helper: Tensor, shift: int) -> None:
    """x ^= x >> shift, unsigned."""
    torch.bitwise_right_shift(x, shift, out=helper)
    x.bitwise_xor_(helper.bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """The low 32 bits as a signed integer."""
    return ((word + (1 << 31)) & _WORD) - (1 << 31)


def _signed_tensor(words: Tensor) -> Tensor:
    """The same of int64, as int32."""
    return (((words + (1 << 31)) & _WORD) - (1 << 31)).to(torch.int32)


def _float32(value: float) -> float:
    """Nearest float32; infinite beyond its range."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _step(low: float, high: float) -> float:
    """(high - low) / 65536, cut to 8 significant bits; 0 where that is no normal float32."""
    mantissa, exponent = math.frexp((high - low) / 65536)
    step = math.ldexp(math.floor(mantissa * 256), exponent - 8)
    return step if step >= 2.0**-126 else 0.0
