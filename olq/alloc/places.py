"""From byte positions in a storage to coordinates that a person can read, and what chance explains of them.

Chance    a written byte equals its random poison with probability 1/256, whatever was written. So of m
          written bytes k or more do so with probability at most 2**-bits, bits = m * D(k/m, 1/256), by
          Chernoff's bound.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import log2, prod

import torch
from torch import Tensor

from olq.alloc.memory import fill_padding_
from olq.alloc.spec import TensorSpec
from olq.layout import contiguous_strides

Coordinate = tuple[int, ...]
Box = tuple[tuple[int, int], ...]

#: A tensor is blamed by chance with probability below 2**-SURE_BITS.
SURE_BITS = 40

_MOST_PLACES = 4096  # coordinates that one finding keeps
_MOST_SLICED = 1 << 20  # positions whose coordinates are looked at one by one, some microseconds each


def coordinates_of(spec: TensorSpec, byte: int) -> list[Coordinate]:
    """Logical coordinates of what lies in a byte: two for packed nibbles, none in a gap between strides.

    A padding cell of an order has a coordinate outside the logical matrix.
    """
    if spec.order is None:
        place = _strided(spec, byte // spec.dtype.itemsize)
        return [] if place is None else [place]
    unit = spec.order.unit_bits or spec.bits
    matrix, inside = divmod(byte * 8, spec.order.extent * unit)
    lead = _unravel(matrix, spec.shape[:-2])
    steps = range(0, 8, min(unit, 8))
    return [(*lead, *spec.order.inverse((inside + bit) // unit).coordinate) for bit in steps]


def allocator_bytes(spec: TensorSpec) -> tuple[Tensor, Tensor] | None:
    """What the allocator itself writes, as padding: which bytes (bool) and their values (uint8), each [nbytes].

    Returns:
        None if it writes nothing.
    """
    order = spec.order
    if order is None or not order.fills() or not spec.nbytes:
        return None
    unit = (order.unit_bits or spec.bits) // 8
    filled = torch.zeros(spec.nbytes // unit // order.extent, *order.storage_shape, dtype=torch.bool)
    for fill in order.fills():
        filled[(slice(None), *(slice(start, stop) for start, stop in fill.box))] = True
    values = torch.zeros(spec.extent, dtype=spec.dtype)
    fill_padding_(values, spec)
    return filled.flatten().repeat_interleave(unit), values.view(torch.uint8)


def produced_bytes(spec: TensorSpec) -> int:
    """How many bytes the allocator leaves to the producer."""
    written = allocator_bytes(spec)
    return spec.nbytes - (0 if written is None else int(written[0].sum()))


def sure(spec: TensorSpec, positions: Tensor) -> Tensor:
    """Those of the positions that chance does not explain, given one look at one random pattern.

    Floats: elements that hold their whole NaN. Bytes: runs and slices that hold more poison than written ones
        would.

    Args:
        spec: of the tensor.
        positions: int64, ascending: bytes that hold their poison, without what the allocator wrote.

    Returns:
        int64, ascending.
    """
    if spec.dtype.is_floating_point:
        elements, counts = torch.unique_consecutive(positions // spec.dtype.itemsize, return_counts=True)
        whole = elements[counts == spec.dtype.itemsize]
        return positions[torch.isin(positions // spec.dtype.itemsize, whole)]
    axes = _axes(spec)
    # A run may start anywhere, and each index of each axis is a slice: so many chances there are of a wrong blame.
    need = SURE_BITS + log2(spec.nbytes + sum(axes) + 1)
    total = produced_bytes(spec)
    if len(positions) * 2 > total and bits_of_chance(len(positions), total) >= need:
        return positions  # mostly unwritten: no need to look where
    # The narrowest explanation first, so that bytes which hold their poison by chance are not blamed along.
    run_of = torch.cat((positions[:1] * 0, (positions.diff() != 1).cumsum(0)))
    blamed = torch.bincount(run_of, minlength=1)[run_of] * 8 >= need
    for slice_size, members in _slices(spec, positions.tolist(), axes, total):
        rest = [i for i in members if not blamed[i]]
        if bits_of_chance(len(rest), slice_size) >= need:
            blamed[rest] = True
    return positions[blamed]


def bits_of_chance(k: int, m: int) -> float:
    """At least this many bits speak against k of m written bytes equalling their poison."""
    m = max(k, m)
    if k * 256 <= m:
        return 0.0
    share = k / m
    rest = 0.0 if k == m else (1 - share) * log2((1 - share) / (255 / 256))
    return m * (share * log2(share * 256) + rest)


def boxes_text(places: Iterable[Coordinate], most: int = 4) -> str:
    """Coordinates as slices, merged where they form boxes: "[5:128, 0:4]"."""
    boxes = _boxes(sorted(set(places)))
    shown = ", ".join("[" + ", ".join(_span(a, b) for a, b in box) + "]" for box in boxes[:most])
    return shown + (f" and {len(boxes) - most} more places" if len(boxes) > most else "")


def places_of(spec: TensorSpec, positions: Sequence[int]) -> tuple[list[Coordinate], int]:
    """Distinct coordinates of the first few thousand positions, and how many of those lie in gaps."""
    found: dict[Coordinate, None] = {}
    gaps = 0
    for p in positions[:_MOST_PLACES]:
        places = coordinates_of(spec, p)
        gaps += not places
        found.update(dict.fromkeys(places))
    return sorted(found), gaps


def size_text(spec: TensorSpec) -> str:
    """Dtype, shape and layout in a few words."""
    dtype = str(spec.dtype).removeprefix("torch.")
    layout = "" if spec.layout == "row_major" else f", {spec.layout}"
    if spec.order is not None and (spec.order.rows, spec.order.columns) != spec.order.shape:
        layout += f" of a {spec.order.rows}x{spec.order.columns} matrix"
    if spec.order is None and spec.stride != contiguous_strides(spec.shape):
        layout += f", strides {list(spec.stride)}"
    return f"{dtype} {list(spec.shape)}{layout}"


def _slices(
    spec: TensorSpec, positions: list[int], axes: tuple[int, ...], total: int
) -> Iterator[tuple[int, list[int]]]:
    """Groups that can be missing as one, (bytes, indices into `positions`): gaps, rows, columns, all."""
    if len(positions) > _MOST_SLICED:
        yield total, list(range(len(positions)))
        return
    slices: dict[tuple[int, int], list[int]] = defaultdict(list)
    gaps = []
    for i, p in enumerate(positions):
        places = coordinates_of(spec, p)
        if not places:
            gaps.append(i)
            continue
        # One of two nibbles is enough: they share their fate.
        place = (*places[0][:-1], places[0][-1] // len(places))
        for axis, index in enumerate(place):
            slices[axis, index].append(i)
    data = prod(axes) * spec.nbytes // max(spec.extent, 1) if spec.order is None else total
    yield total - data, gaps
    for (axis, _), members in slices.items():
        yield data // axes[axis], members
    yield total, list(range(len(positions)))


def _axes(spec: TensorSpec) -> tuple[int, ...]:
    """Extents of the coordinates; nibbles count by bytes."""
    if spec.order is None:
        return spec.shape
    if spec.order.unit_bits == 4:
        return (*spec.shape[:-2], *spec.order.shape)
    return (*spec.shape[:-2], spec.order.rows, spec.order.columns)


def _strided(spec: TensorSpec, element: int) -> Coordinate | None:
    """Index of an element by its strides; None in a gap."""
    index = [0] * len(spec.shape)
    dims = [d for d, size in enumerate(spec.shape) if size > 1]
    for dim in sorted(dims, key=lambda d: -spec.stride[d]):
        index[dim], element = divmod(element, spec.stride[dim])
        if index[dim] >= spec.shape[dim]:
            return None
    return None if element else tuple(index)


def _unravel(position: int, shape: Sequence[int]) -> Coordinate:
    index = []
    for size in reversed(shape):
        position, i = divmod(position, max(size, 1))
        index.append(i)
    return tuple(reversed(index))


def _boxes(places: list[Coordinate]) -> list[Box]:
    """Disjoint boxes that cover sorted coordinates: neighbouring indices with equal rests are merged."""
    if not places or not places[0]:
        return [()] if places else []
    groups: dict[int, list[Coordinate]] = defaultdict(list)
    for first, *rest in places:
        groups[first].append(tuple(rest))
    rests = [(index, _boxes(group)) for index, group in groups.items()]
    boxes: list[Box] = []
    start = rests[0][0]
    for (index, rest), (following, next_rest) in pairwise([*rests, (-1, [])]):
        if following != index + 1 or next_rest != rest:
            boxes += [((start, index + 1), *box) for box in rest]
            start = following
    return boxes


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"
