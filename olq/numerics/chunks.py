"""Walk a [*lead, n, k] tensor in rectangles of bounded size, so that scratch does not grow with the tensor.

Box     whole scale units, at least one: their scales are chosen together.
Piece   whole units, or a part of one unit that is too large for the buffers. Elements are read, scaled and rounded
        piece by piece. A box that fits is one piece.

A box is read for the scales, then for the codes. Ragged ends never share a box or a piece with full units: each has
one unit size, (rows, columns), that divides it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BYTES = 5 << 20
"""What the large buffers for a piece may take together. With all temporaries a call stays under 8 MB (a test
measures it). Smaller pieces would fit a core's own cache, yet are slower: every operator ends where its threads meet,
and a thread that another program keeps waiting is waited for there. Read at each call: tests make it small."""

ELEMENTS_A_SCALE = 16
"""A box of smaller units is smaller than it may be: choosing a scale takes about seven float32 temporaries."""

LEAST_ELEMENTS = 32
"""A piece holds at least one block of any format."""


@dataclass(frozen=True, slots=True)
class Box:
    """Which part of a tensor, and how it is cut; a piece is one too.

    Args:
        lead: one slice for each leading dimension.
        rows: range along n.
        columns: range along k.
        unit: (rows, columns) of a scale unit here. If `whole`, it divides the box.
        grid: (row, column) of the box's first unit in the matrix's grid of units.
        whole: False if the box is only a part of unit `grid`.
    """

    lead: tuple[slice, ...]
    rows: slice
    columns: slice
    unit: tuple[int, int]
    grid: tuple[int, int]
    whole: bool

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the box in the tensor."""
        return (*self.lead, self.rows, self.columns)

    @property
    def units(self) -> tuple[int, int]:
        """Number of units (down, across); 1, 1 for a part of a unit."""
        if not self.whole:
            return 1, 1
        return _length(self.rows) // self.unit[0], _length(self.columns) // self.unit[1]

    @property
    def unit_index(self) -> tuple[slice, ...]:
        """Index of the box's units in a [*lead, grid rows, grid columns] tensor."""
        (i, j), (down, across) = self.grid, self.units
        return (*self.lead, slice(i, i + down), slice(j, j + across))

    @property
    def split_shape(self) -> tuple[int, ...]:
        """[*l, down, unit rows, across, unit columns]: the box's own shape, cut into units."""
        (down, across), (height, width) = self.units, (_length(self.rows), _length(self.columns))
        return (*(_length(s) for s in self.lead), down, height // down, across, width // across)


def spread(of_units: Tensor) -> Tensor:
    """View one value a unit, [*l, down, across], so that it broadcasts with elements of shape `split_shape`."""
    return of_units.unsqueeze(-1).unsqueeze(-3)


def unit_of(shape: torch.Size | tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The unit's (rows, columns) for a [*lead, n, k] tensor; block 0 means the whole extent."""
    return block[0] or max(shape[-2], 1), block[1] or max(shape[-1], 1)


def grid_of(shape: torch.Size | tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """(down, across): how many units cover a matrix. A whole extent is one unit even when it is empty."""
    down = -(-shape[-2] // block[0]) if block[0] else 1
    across = -(-shape[-1] // block[1]) if block[1] else 1
    return down, across


def boxes(shape: torch.Size | tuple[int, ...], unit: tuple[int, int], elements: int) -> Iterator[Box]:
    """Walk a [*lead, n, k] tensor in whole units; an empty one has no boxes.

    Args:
        shape: of the tensor.
        unit: (rows, columns) of a full scale unit, both positive.
        elements: that a box may have; one unit is allowed whatever its size.
    """
    return _walk(shape, unit, elements, cut=False)


def pieces(shape: torch.Size | tuple[int, ...], unit: tuple[int, int], elements: int) -> Iterator[Box]:
    """Walk a [*lead, n, k] tensor like `boxes`, but cut a unit that is larger than `elements`."""
    return _walk(shape, unit, elements, cut=True)


def _walk(
    shape: torch.Size | tuple[int, ...], unit: tuple[int, int], elements: int, *, cut: bool
) -> Iterator[Box]:
    lead, (n, k) = tuple(shape[:-2]), tuple(shape[-2:])
    for rows, unit_rows in _regions(n, unit[0]):
        for columns, unit_columns in _regions(k, unit[1]):
            yield from _region(lead, rows, columns, (unit_rows, unit_columns), unit, elements, cut)


def _regions(total: int, unit: int) -> Iterator[tuple[slice, int]]:
    """The run of full units, then the ragged rest, each with its unit size; empty ones are left out."""
    full = total - total % unit
    if full:
        yield slice(0, full), unit
    if total % unit:
        yield slice(full, total), total % unit


def _region(
    lead: tuple[int, ...],
    rows: slice,
    columns: slice,
    unit: tuple[int, int],
    full: tuple[int, int],
    elements: int,
    cut: bool,
) -> Iterator[Box]:
    width, height = _length(columns), _length(rows)
    unit_rows, unit_columns = unit
    size = unit_rows * unit_columns

    def grid(row: slice, column: slice) -> tuple[int, int]:
        return row.start // full[0], column.start // full[1]

    if cut and size > elements:
        across = min(unit_columns, elements)
        for one in _lead_runs(lead, 1):
            for row in _cut(rows, unit_rows):
                for column in _cut(columns, unit_columns):
                    for r in _cut(row, max(1, elements // across)):
                        for c in _cut(column, across):
                            yield Box(one, r, c, unit, grid(row, column), whole=False)
        return
    budget = max(size, min(elements, elements // ELEMENTS_A_SCALE * size))
    across = width if unit_rows * width <= budget else budget // size * unit_columns
    down = max(1, budget // (unit_rows * across)) * unit_rows
    matrices = budget // (height * width) if height * width <= budget else 1
    for some in _lead_runs(lead, matrices):
        for row in _cut(rows, down):
            for column in _cut(columns, across):
                yield Box(some, row, column, unit, grid(row, column), whole=True)


def _lead_runs(lead: tuple[int, ...], capacity: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of the leading dimensions that hold at most `capacity` matrices, last dimension fastest."""
    if not lead:
        yield ()
        return
    inner = 1
    for extent in lead[1:]:
        inner *= extent
    if inner == 0:
        return
    run = capacity // inner
    if run:
        for first in _cut(slice(0, lead[0]), run):
            yield (first, *(slice(0, extent) for extent in lead[1:]))
        return
    for i in range(lead[0]):
        for rest in _lead_runs(lead[1:], capacity):
            yield (slice(i, i + 1), *rest)


def _cut(span: slice, step: int) -> Iterator[slice]:
    for start in range(span.start, span.stop, step):
        yield slice(start, min(start + step, span.stop))


def _length(span: slice) -> int:
    return span.stop - span.start


class Scratch:
    """Buffers of one call, made on first use and reused for every piece.

    Args:
        total: elements of the whole tensor; a small tensor gets small buffers.
        device: where the arithmetic happens.
        bytes_an_element: of all buffers that will be taken together.

    Attributes:
        elements: that a piece may have, and a box of more than one unit.
    """

    def __init__(self, total: int, device: torch.device, bytes_an_element: int) -> None:
        self.elements = max(LEAST_ELEMENTS, BYTES // bytes_an_element)
        self._size, self.device = min(total, self.elements), device
        self._buffers: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}

    def constant(self, value: float) -> Tensor:
        """A zero-dimensional float32 tensor, made once a call."""
        name = f"constant {value}"
        if name not in self._buffers:
            self._buffers[name] = torch.full((), value, dtype=torch.float32, device=self.device)
        return self._buffers[name]

    def take(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of this shape, uninitialised, in the buffer `name`; the last taker's is
        overwritten."""
        last = self._taken.get(name)
        if last is not None and last.shape == shape:
            return last
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._size, dtype=dtype, device=self.device)
        self._taken[name] = taken = self._buffers[name][: math.prod(shape)].view(shape)
        return taken
