"""Cut a strided tensor into boxes by the index of its elements in a larger one: what `random` walks.

A dimension is (elements, stride in memory, stride in the index). A box is a list of dimensions with the index and the
place in memory of its first element; the last dimension is a run of neighbours in the index, and the steps of the
others are even, so that all runs begin in the same half of a pair.
"""

import math
from collections.abc import Iterable, Iterator

#: (elements, stride in memory, stride in the index).
Dim = tuple[int, int, int]
Box = tuple[list[Dim], int, int]

RUN = 248
"""Longest run of a box whose neighbours in the index are not neighbours in memory. No power of two: the rows
of a box would fall on the same lines of the cache (512: 1.3 times the time)."""


def cut(dims: Iterable[Dim], base: int, offset: int, words: int) -> Iterator[Box]:
    """Boxes that make up a tensor.

    Args:
        dims: of the tensor, in any order; elements don't overlap, none is missing.
        base: index of the first element.
        offset: of it in memory.
        words: pairs that a box may touch, where a pair counts once a run. None lies across a multiple of 2**32 pairs.
    """
    for piece in _narrow(_merge(dims), base, offset, words):
        for even in _even(*piece):
            yield from _boxes(*even, words)


def _merge(dims: Iterable[Dim]) -> list[Dim]:
    """Fewest dimensions with the same elements, the last one a run of neighbours in the index."""
    merged: list[Dim] = []
    for size, stride, step in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[2]):
        if merged and merged[-1][1:] == (size * stride, size * step):
            merged[-1] = merged[-1][0] * size, stride, step
        else:
            merged.append((size, stride, step))
    if not merged or merged[-1][2] != 1:
        merged.append((1, 0, 1))
    return merged


def _narrow(dims: list[Dim], base: int, offset: int, words: int) -> Iterator[Box]:
    """Cut long runs that lie across memory (a transposed tensor), so that a box is near square."""
    *outer, (length, stride, step) = dims
    across = any(s < stride for _, s, _ in outer)
    most = max(RUN, 2 * words // math.prod(n for n, _, _ in outer)) if across else length
    for i in range(0, length, most):
        yield [*outer, (min(most, length - i), stride, step)], base + i, offset + i * stride


def _even(dims: list[Dim], base: int, offset: int) -> Iterator[Box]:
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


def _boxes(dims: list[Dim], base: int, offset: int, words: int) -> Iterator[Box]:
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


def _split(dims: list[Dim], base: int, offset: int) -> Iterator[Box]:
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
