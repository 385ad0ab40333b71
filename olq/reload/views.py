"""Which elements of a parameter a view of its storage shows.

A loader writes into views: slices, transposes, steps, `view(heads, 2, dim, K)[:, i]`, flattened pieces. A view whose
dimensions map one to one onto the parameter's is a box, read off its strides; a view with one dimension too many is a
few boxes. Everything else is resolved by writing through the same strides into a mask: always right, only slower.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as cartesian
from math import prod
from typing import Any

import torch
from torch import Tensor

from olq.reload.region import Box

#: A view is cut along one dimension into at most this many boxes before the mask takes over.
_MOST_CUTS = 256


@dataclass(frozen=True, slots=True)
class Mapping:
    """A view as a box of its parameter.

    Args:
        box: the elements.
        order: the view's dimensions in the order of the parameter's; None stands for a dimension of size 1 that the
            view lacks.
        index: index into the view's dimensions, before `order`, that gives this box.
        merged: sizes of the view with neighbouring dimensions merged, if that comes before `index`.
    """

    box: Box
    order: tuple[int | None, ...]
    index: tuple[int | slice, ...] = ()
    merged: tuple[int, ...] | None = None

    def source(self, source: Tensor) -> Tensor:
        """A tensor of the view's shape as a tensor of the box's shape. No copy, unless merged dimensions need one."""
        if self.merged is not None:
            source = source.reshape(self.merged)
        if not self.index and self.order == tuple(range(source.dim())):
            return source
        source = source[self.index]
        kept = [d for d in self.order if d is not None]
        rest = [d for d in range(source.dim()) if d not in kept]  # sizes 1, and lost with the next index
        source = source.permute((*rest, *kept))[(0,) * len(rest)]
        for d, origin in enumerate(self.order):
            if origin is None:
                source = source.unsqueeze(d)
        return source


def resolve(parameter: Tensor, view: Tensor) -> list[Mapping] | None:
    """The boxes of `parameter` that `view` shows, or None if a mask is needed.

    Args:
        parameter: the whole tensor; without overlap.
        view: any view of its storage, with elements.
    """
    if view.dtype.itemsize != parameter.dtype.itemsize:
        return None
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    sizes, strides = tuple(view.shape), view.stride()
    if not offset and sizes == parameter.shape and strides == parameter.stride():
        return _whole(sizes)
    if found := _box(parameter, offset, sizes, strides):
        return [Mapping(*found)]
    if (merged := _merge(parameter, sizes, strides)) and (found := _box(parameter, offset, *merged)):
        return [Mapping(*found, merged=merged[0])]
    wide = [d for d in range(len(sizes)) if sizes[d] > 1 and strides[d]]
    for d in sorted(wide, key=lambda d: -strides[d]):  # one dimension too many: cut it into single steps
        if len(wide) > 1 and sizes[d] <= _MOST_CUTS:
            less = sizes[:d] + sizes[d + 1 :], strides[:d] + strides[d + 1 :]
            cuts: list[Mapping] = []
            for i in range(sizes[d]):
                found = _box(parameter, offset + i * strides[d], *less)
                if not found:
                    break
                cuts.append(Mapping(*found, index=(*(slice(None),) * d, i)))
            if len(cuts) == sizes[d]:
                return cuts
    return None


@lru_cache(maxsize=1024)
def _whole(sizes: tuple[int, ...]) -> list[Mapping]:
    """All of a parameter: the common case."""
    return [Mapping(tuple(map(range, sizes)), tuple(range(len(sizes))))]


def _box(
    parameter: Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[Box, tuple[int | None, ...]] | None:
    """The box that starts `offset` elements after the parameter, and the order of dimensions; None if it is none."""
    shape, own = parameter.shape, parameter.stride()
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -own[d])
    start = [0] * len(shape)
    for d in dims:
        start[d], offset = divmod(offset, own[d])
        if not 0 <= start[d] < shape[d]:
            return None
    if offset:
        return None
    order: list[int | None] = [None] * len(shape)
    box = [range(first, first + 1) for first in start]
    for i, (count, stride) in enumerate(zip(sizes, strides, strict=True)):
        if count == 1:
            continue
        d = next((d for d in dims if own[d] <= stride), None)
        if d is None or order[d] is not None or stride % own[d]:
            return None
        step = stride // own[d]
        if start[d] + (count - 1) * step >= shape[d]:
            return None
        order[d], box[d] = i, range(start[d], start[d] + (count - 1) * step + 1, step)
    return tuple(box), tuple(order)


def _merge(
    parameter: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The geometry with a run of neighbouring dimensions merged where the parameter has one: [H, D, K] as [H*D, K]."""
    for d in range(len(sizes) - 1):
        own = any(n > 1 and s == strides[d] for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        if strides[d] == strides[d + 1] * sizes[d + 1] and not own:
            less = (*sizes[:d], sizes[d] * sizes[d + 1], *sizes[d + 2 :]), strides[:d] + strides[d + 1 :]
            return _merge(parameter, *less) or less
    return None


def overlaps_itself(view: Tensor) -> bool:
    """Whether two indices of a view show one element, as an expanded tensor's do: real memory refuses such writes."""
    reach = 0
    for stride, count in sorted((s, n) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1):
        if not stride:
            return True
        if stride <= reach:  # only a count can tell: steps of 2 and 3 may interleave
            return int(_flat(view, span(view)).count_nonzero()) < view.numel()
        reach += stride * (count - 1)
    return False


def span(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, that a tensor with elements uses of its storage."""
    first = int(tensor.storage_offset())
    last = first + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.dtype.itemsize, (last + 1) * tensor.dtype.itemsize


def _flat(view: Tensor, extent: tuple[int, int]) -> Tensor:
    """Mask of the elements between two bytes of a view's storage: those that it shows."""
    flat = torch.zeros((extent[1] - extent[0]) // view.dtype.itemsize, dtype=torch.bool)
    flat.as_strided(
        view.shape, view.stride(), view.storage_offset() - extent[0] // view.dtype.itemsize
    ).fill_(True)
    return flat


def shown(
    parameter: Tensor,
    view: Tensor,
    write: Callable[[Tensor], Any] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Mask of the parameter's shape: the elements that a write onto `view` covers.

    Args:
        parameter: with elements.
        view: any view of the same storage; it may reach beyond the parameter.
        write: writes True into a boolean tensor of the view's geometry; None fills it.
        device: where the mask is made: one byte an element of what lies between first and last element.
    """
    spans = span(parameter), span(view)
    first, last = min(s[0] for s in spans), max(s[1] for s in spans)
    unit = parameter.dtype.itemsize if parameter.dtype.itemsize == view.dtype.itemsize else 1
    flat = torch.zeros((last - first) // unit, dtype=torch.bool, device=device)

    def same(tensor: Tensor) -> Tensor:
        """The tensor's geometry on the mask; with a dimension more, for its bytes, if sizes of elements differ."""
        wide = tensor.dtype.itemsize // unit
        extra = ((), ()) if unit > 1 or tensor.dtype.itemsize == 1 else ((wide,), (1,))
        shape = (*tensor.shape, *extra[0])
        stride = (*(int(s) * wide for s in tensor.stride()), *extra[1])
        return flat.as_strided(shape, stride, int(tensor.storage_offset()) * wide - first // unit)

    part = same(view)
    if write is None:
        part.fill_(True)
    else:
        write(part)
    mine = same(parameter)
    return mine if mine.dim() == parameter.dim() else mine.all(-1)


def mask_boxes(mask: Tensor) -> Iterator[Box]:
    """A boolean tensor's True elements as disjoint boxes."""
    if mask.dim() == 0:
        if bool(mask):
            yield ()
        return
    each = [_indices(mask.movedim(d, 0).reshape(mask.shape[d], -1).any(1)) for d in range(mask.dim())]
    if not all(each):
        return
    if prod(map(len, each)) == int(mask.count_nonzero()):  # a product of index sets: what most writes are
        yield from cartesian(*map(_progressions, each))
    elif mask.dim() == 1:
        yield from ((r,) for r in _progressions(each[0]))
    elif mask.dim() == 2:
        patterns, group = torch.unique(mask, dim=0, return_inverse=True)
        for i, pattern in enumerate(patterns):
            columns = _indices(pattern)
            if columns:
                yield from cartesian(_progressions(_indices(group == i)), _progressions(columns))
    else:
        for i in each[0]:
            yield from ((range(i, i + 1), *box) for box in mask_boxes(mask[i]))


def _indices(flags: Tensor) -> list[int]:
    return flags.nonzero().flatten().tolist()


def _progressions(indices: list[int]) -> list[range]:
    """Rising indices as ranges: neighbours first, then even steps of three and more."""
    found: list[range] = []
    start = 0
    while start < len(indices):
        end = start + 1
        step = indices[end] - indices[start] if end < len(indices) else 1
        while end < len(indices) and indices[end] - indices[end - 1] == step:
            end += 1
        if step > 1 and end - start < 3:
            step, end = 1, start + 1
        found.append(range(indices[start], indices[end - 1] + 1, step))
        start = end
    return found
