"""Uniform values that depend on (seed, name, index) alone: rule `olq-uniform-1`.

    w = mix(i >> 1)                            one 32-bit word for two neighbours
    t = low half (i even) or high half (i odd) of w, a signed 16-bit integer
    x = clamp(centre + t * step, low, high)    float32; then rounded to the tensor's dtype

i         index of the element in the unsharded tensor, row-major. So neither chunks, layout, device nor
          tensor-parallel size can change a value, and the old ones are never read.
Exact     `step` has 8 significant bits, so t * step has no rounding: a kernel may fuse it with the addition.
Integers  32 bits, modulo 2**32. Torch has no unsigned shift: an arithmetic one and a mask stand in for it.
Spec      docs/formats/dummy.md, with the reasons for this mix and its measured quality.
Scratch   1.3 MiB on a CPU, 20 MiB on another device, whatever the tensor's size.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from olq.errors import ConfigError, LayoutError
from olq.layout import contiguous_strides, overlaps

RULE = "olq-uniform-1"
"""Enters every key: a rule with other values gets another name."""

WORDS = 1 << 16
"""Words of one box on a CPU: they, their helper and two float32 a word stay in a core's second-level cache.
Sixteen times as many elsewhere, where a launch costs more than the arithmetic. Read when a device is first
used, so that tests can make it small."""

RUN = 248
"""Longest run of a box whose neighbours in the index are not neighbours in memory. No power of two: the rows
of a box would fall on the same lines of the cache (512: 1.3 times the time)."""

_GAMMA = 0x9E3779B9
_FACTORS = (0x7FEB352D, 0x846CA68B)

_WORD = 0xFFFFFFFF

#: One dimension: (elements, stride in memory, stride in the index).
_Dim = tuple[int, int, int]


class UniformFill:
    """Fills tensors with values between two bounds.

    Args:
        low: lower bound, rounded to float32.
        high: upper bound, likewise.
        seed: any integer.

    Raises:
        ConfigError: a bound is not finite in float32, or `low` is above `high`.
    """

    def __init__(self, low: float, high: float, seed: int) -> None:
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
            buffers = self._buffers_on(out.device)
            dims = _merge(zip(out.shape, out.stride(), strides, strict=True))
            for piece in _narrow(dims, base, int(out.storage_offset()), buffers.size):
                for even in _even(*piece):
                    for box in _boxes(*even, buffers.size):
                        self._fill_box(out, name, buffers, *box)

    def _fill_box(
        self, out: Tensor, name: str, buffers: "_Buffers", dims: list[_Dim], base: int, offset: int
    ) -> None:
        """Write one box: rows whose index steps are even, each a run of neighbours in the index."""
        *outer, (length, _, _) = dims
        rows = [size for size, _, _ in outer]
        first, odd = base >> 1, base & 1
        width = (odd + length + 1) >> 1
        count = math.prod(rows)
        words = buffers.words[: count * width].view(*rows, width)
        helper = buffers.helper[: count * width].view(*rows, width)
        key_0, key_1 = key(self.seed, name, first >> 32)
        if outer:
            starts = torch.full(rows, first & _WORD, dtype=torch.int64, device=out.device)
            for d, (size, _, step) in enumerate(outer):
                steps = torch.arange(size, dtype=torch.int64, device=out.device) * (step // 2)
                starts += steps.view(*(-1 if e == d else 1 for e in range(len(outer))))
            starts = starts.mul_(_GAMMA).add_(key_0)  # low 32 bits are right even where 64 overflow
            torch.add(buffers.weyl[:width], _signed_tensor(starts)[..., None], out=words)
        else:
            torch.add(buffers.weyl[:width], _signed(first * _GAMMA + key_0), out=words)
        _mix(words, helper, key_1)
        values = buffers.values[: count * length].view(*rows, length)
        values.copy_(words.view(torch.int16)[..., odd : odd + length])
        values.mul_(self.step)
        if self.centre:
            values.add_(self.centre)
        if self._clamps:
            values.clamp_(self.low, self.high)
        target = out.as_strided([size for size, _, _ in dims], [stride for _, stride, _ in dims], offset)
        target.copy_(values)

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


class _Buffers:
    """Scratch of one device, for boxes of `size` words."""

    def __init__(self, device: torch.device) -> None:
        self.size = WORDS if device.type == "cpu" else 16 * WORDS
        with torch.inference_mode(False):
            self.weyl = torch.arange(self.size, dtype=torch.int32, device=device).mul_(_signed(_GAMMA))
            self.words, self.helper = torch.empty_like(self.weyl), torch.empty_like(self.weyl)
            self.values = torch.empty(2 * self.size, dtype=torch.float32, device=device)


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


def _merge(dims: Iterator[_Dim] | Sequence[_Dim]) -> list[_Dim]:
    """Fewest dimensions with the same elements, the last one a run of neighbours in the index."""
    merged: list[_Dim] = []
    for size, stride, step in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[2]):
        if merged and merged[-1][1:] == (size * stride, size * step):
            merged[-1] = merged[-1][0] * size, stride, step
        else:
            merged.append((size, stride, step))
    if not merged or merged[-1][2] != 1:
        merged.append((1, 0, 1))
    return merged


def _narrow(dims: list[_Dim], base: int, offset: int, words: int) -> Iterator[tuple[list[_Dim], int, int]]:
    """Cut long runs that lie across memory (a transposed tensor), so that a box is near square."""
    *outer, (length, stride, step) = dims
    across = any(s < stride for _, s, _ in outer)
    most = max(RUN, 2 * words // math.prod(n for n, _, _ in outer)) if across else length
    for i in range(0, length, most):
        yield [*outer, (min(most, length - i), stride, step)], base + i, offset + i * stride


def _even(dims: list[_Dim], base: int, offset: int) -> Iterator[tuple[list[_Dim], int, int]]:
    """Cut rows whose index steps are odd into every second one, so that all runs begin in the same half."""
    odd = next((d for d, (_, _, step) in enumerate(dims[:-1]) if step & 1), None)
    if odd is None:
        yield dims, base, offset
        return
    size, stride, step = dims[odd]
    for parity in (0, 1):
        half = (size + 1 - parity) // 2, 2 * stride, 2 * step
        rest = [*dims[:odd], half, *dims[odd + 1 :]]
        yield from _even(rest, base + parity * step, offset + parity * stride)


def _boxes(dims: list[_Dim], base: int, offset: int, words: int) -> Iterator[tuple[list[_Dim], int, int]]:
    """Cut into boxes of at most `words` words, none across a multiple of 2**32 words."""
    size, stride, step = dims[0]
    each = math.prod(n for n, _, _ in dims[1:-1]) * ((dims[-1][0] + 2) >> 1) if len(dims) > 1 else 0
    if each > words:
        for i in range(size):
            yield from _boxes(dims[1:], base + i * step, offset + i * stride, words)
        return
    most = words // each if each else 2 * words - 2
    for i in range(0, size, most):
        rest = [(min(most, size - i), stride, step), *dims[1:]]
        yield from _split(rest, base + i * step, offset + i * stride)


def _split(dims: list[_Dim], base: int, offset: int) -> Iterator[tuple[list[_Dim], int, int]]:
    """Halve a box until its words have one block."""
    last = base + sum((size - 1) * step for size, _, step in dims)
    if base >> 33 == last >> 33:
        yield dims, base, offset
        return
    d = next(d for d, (size, _, _) in enumerate(dims) if size > 1)
    size, stride, step = dims[d]
    for start, stop in ((0, size // 2), (size // 2, size)):
        rest = [*dims[:d], (stop - start, stride, step), *dims[d + 1 :]]
        yield from _split(rest, base + start * step, offset + start * stride)
