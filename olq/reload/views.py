"""Which elements of a parameter a view of it shows.

A loader writes into views: slices, transposes, steps, `view(heads, 2, dim, K)[:, i]`, flattened pieces. A view whose
dimensions map one to one onto the parameter's is a box, read off its strides; a view with one dimension too many is a
few boxes. Everything else is resolved by writing through the same strides into a mask: always right, only slower.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from olq.reload.region import Box, boxes

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
    """

    box: Box
    order: tuple[int | None, ...]
    index: tuple[int | slice, ...]

    def source(self, source: Tensor) -> Tensor:
        """A tensor of the view's shape as a tensor of the box's shape. No copy."""
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
        parameter: the whole tensor; dense, without overlap.
        view: any view of its storage.
    """
    if view.shape == parameter.shape and view.stride() == parameter.stride():  # the whole: the common case
        return [_direct(tuple(range(n) for n in parameter.shape))]
    offset = int(view.storage_offset()) - int(parameter.storage_offset())
    sizes, strides = tuple(view.shape), view.stride()
    if found := _box(parameter, offset, sizes, strides):
        return [Mapping(*found, index=())]
    wide = [d for d in range(len(sizes)) if sizes[d] > 1]
    for d in sorted(wide, key=lambda d: -strides[d]):  # one dimension too many: cut it into single steps
        if len(wide) > 1 and sizes[d] <= _MOST_CUTS:
            less = sizes[:d] + sizes[d + 1 :], strides[:d] + strides[d + 1 :]
            if _box(parameter, offset, *less):
                found = [_box(parameter, offset + i * strides[d], *less) for i in range(sizes[d])]
                index = (slice(None),) * d
                return [Mapping(*f, index=(*index, i)) for i, f in enumerate(found) if f]
    return None


def _direct(box: Box) -> Mapping:
    return Mapping(box, tuple(range(len(box))), ())


def _box(
    parameter: Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[Box, tuple[int | None, ...]] | None:
    dims = sorted(
        (d for d in range(parameter.dim()) if parameter.shape[d] > 1), key=lambda d: -parameter.stride(d)
    )
    start = [0] * parameter.dim()
    for d in dims:
        start[d], offset = divmod(offset, parameter.stride(d))
    if offset:
        return None
    order: list[int | None] = [None] * parameter.dim()
    box = [range(first, first + 1) for first in start]
    for i, (count, stride) in enumerate(zip(sizes, strides, strict=True)):
        if count == 1:
            continue
        d = next((d for d in dims if parameter.stride(d) <= stride), None)
        if d is None or order[d] is not None or stride % parameter.stride(d):
            return None
        step = stride // parameter.stride(d)
        if start[d] + (count - 1) * step >= parameter.shape[d]:
            return None
        order[d], box[d] = i, range(start[d], start[d] + (count - 1) * step + 1, step)
    return tuple(box), tuple(order)


def overlaps_itself(view: Tensor) -> bool:
    """Whether two indices of a view show one element, as an expanded tensor's do: real memory refuses such writes."""
    reach = 0
    for stride, count in sorted((s, n) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (count - 1)
    return False


def mask_boxes(shown: Tensor) -> Iterator[Box]:
    """A boolean tensor's True elements as disjoint boxes."""
    if shown.dim() < 2:
        shown_rows, lead = shown.reshape(1, -1), 0
    else:
        shown_rows, lead = shown.reshape(-1, shown.shape[-1]), shown.dim() - 1
    patterns, group = torch.unique(shown_rows, dim=0, return_inverse=True)
    for i, pattern in enumerate(patterns):
        columns = _bits(pattern)
        if not columns:
            continue
        rows = group == i
        if lead == 0:
            yield from (box[-shown.dim() :] if shown.dim() else () for box in boxes((columns,)))
        elif lead == 1:
            yield from boxes((_bits(rows), columns))
        else:  # rows of the flattened leading dimensions: cut by each index of those before the last
            by_row = rows.reshape(-1, shown.shape[-2])
            for j, some in enumerate(by_row):
                if bits := _bits(some):
                    outer = torch.unravel_index(torch.tensor(j), shown.shape[:-2])
                    fixed = tuple(range(int(o), int(o) + 1) for o in outer)
                    yield from ((*fixed, *box) for box in boxes((bits, columns)))


def _bits(flags: Tensor) -> int:
    """A boolean vector as a bit set."""
    packed = flags.to(torch.uint8)
    return int("".join(map(str, packed.flip(0).tolist())) or "0", 2)
