"""Full-precision elements of scale units that are not whole yet.

A unit is staged from its first element to its last and leaves in the call that completes it. Memory is held for
touched units only: pieces of one unit column and at most 1 MiB, or one unit if that is larger, and a piece shrinks to
the units that still wait as soon as one of them leaves.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from olq.reload.region import Coverage, intersect, mask, runs

#: A piece holds several units up to this size, so that shrinking it costs at most this much more for a moment.
PIECE_BYTES = 1 << 20


@dataclass
class Meter:
    """Bytes that are staged now, and the most there ever were. Threads share it."""

    now: int = 0
    peak: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, count: int) -> None:
        """Count bytes in (positive) or out (negative)."""
        with self._lock:
            self.now += count
            self.peak = max(self.peak, self.now)


@dataclass(frozen=True, slots=True)
class Ready:
    """Units that became whole: rows and columns inside the part, and their elements."""

    rows: range
    columns: range
    elements: Tensor


class _Piece:
    """Some units of one unit column: their rows, their columns, a buffer, and what of it has been written."""

    def __init__(self, rows: range, columns: range, buffer: Tensor) -> None:
        self.rows, self.columns, self.buffer = rows, columns, buffer
        self.written = Coverage((len(rows), len(columns)))

    @torch.inference_mode(False)  # a later call, outside of inference mode, has to be able to write here
    def keep(self, rows: range) -> "_Piece":
        """A smaller piece with the rows of these indices."""
        piece = _Piece(
            self.rows[rows.start : rows.stop], self.columns, self.buffer[rows.start : rows.stop].clone()
        )
        piece.written = self.written.take_rows(rows)
        return piece


class Stage:
    """The waiting units of one part of one matrix.

    Args:
        rows: rows of the part.
        columns: columns of the part.
        unit: rows and columns of a unit.
        dtype: dtype of the load-format parameter: what is staged has been rounded to it, as `copy_` would.
        device: where the kernel tensors live.
        meter: counts what is staged, over all stages of a load.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        unit: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self._extent, self._unit = (rows, columns), unit
        self._dtype, self._device, self._meter = dtype, device, meter
        self._owner: dict[tuple[int, int], _Piece] = {}

    def write(self, rows: range, columns: range, source: Tensor) -> Generator[Ready, None, None]:
        """Stage elements and hand out the units that they complete.

        Args:
            rows: rows inside the part, any step.
            columns: columns inside the part, any step.
            source: [len(rows), len(columns)], any float dtype, strides and device.

        Yields:
            Whole units. Their memory is free once the caller drops them. If the caller raises, that unit and those
            after it wait again.
        """
        unit_rows, unit_columns = self._unit
        # A step wider than a unit leaves units untouched in between: take such rows or columns one by one.
        if rows.step > unit_rows > 1:
            for i, row in enumerate(rows):
                yield from self.write(range(row, row + 1), columns, source[i : i + 1])
            return
        for j in range(columns[0] // unit_columns, columns[-1] // unit_columns + 1):
            within = range(j * unit_columns, min((j + 1) * unit_columns, self._extent[1]))
            part = intersect(columns, within)
            if not part:
                continue
            first = (part.start - columns.start) // columns.step
            yield from self._write_column(j, rows, part, source[:, first : first + len(part)])

    def forget(self, rows: range, columns: range) -> None:
        """Take elements out again, as if they had not been staged.

        Args:
            rows: rows inside the part, any step.
            columns: columns inside the part, any step.
        """
        for piece in list(self._pieces()):
            some = intersect(rows, piece.rows), intersect(columns, piece.columns)
            if not all(some):
                continue
            piece.written.remove((_index(some[0], piece.rows), _index(some[1], piece.columns)))
            if not piece.written.count:
                self._count(piece, -1)
                self._owner = {key: owner for key, owner in self._owner.items() if owner is not piece}

    def discard(self) -> None:
        """Drop everything that waits."""
        for piece in self._pieces():
            self._count(piece, -1)
        self._owner.clear()

    def _write_column(self, j: int, rows: range, columns: range, source: Tensor) -> Iterator[Ready]:
        touched = self._touched(rows)
        self._make_pieces(j, touched)
        for piece in dict.fromkeys(self._owner[i, j] for i in touched):
            mine = intersect(rows, piece.rows)
            at = _index(mine, piece.rows), _index(columns, piece.columns)
            first = (mine.start - rows.start) // rows.step
            step = mine.step // rows.step if len(mine) > 1 else 1
            piece.buffer[_slice(at[0]), _slice(at[1])] = source[
                first : first + (len(mine) - 1) * step + 1 : step
            ]
            piece.written.add(at)
            yield from self._leave(j, piece)

    def _touched(self, rows: range) -> range:
        """Unit rows that hold a row of `rows`."""
        unit, _ = self._unit
        return rows if unit == 1 else range(rows[0] // unit, rows[-1] // unit + 1)

    def _make_pieces(self, j: int, touched: range) -> None:
        """Give memory to touched units that have none, in runs."""
        unit_rows, unit_columns = self._unit
        columns = range(j * unit_columns, min((j + 1) * unit_columns, self._extent[1]))
        most = max(PIECE_BYTES // (unit_rows * len(columns) * self._dtype.itemsize), 1)
        run_start = None
        for k in range(len(touched) + 1):
            free = k < len(touched) and (touched[k], j) not in self._owner
            if free and run_start is None:
                run_start = k
            if run_start is not None and (not free or k - run_start == most):
                self._make_piece(j, touched[run_start:k], columns)
                run_start = k if free else None

    @torch.inference_mode(False)
    def _make_piece(self, j: int, units: range, columns: range) -> None:
        unit, _ = self._unit
        rows = units if unit == 1 else range(units[0] * unit, min((units[-1] + 1) * unit, self._extent[0]))
        buffer = torch.empty(len(rows), len(columns), dtype=self._dtype, device=self._device)
        self._own(j, _Piece(rows, columns, buffer))

    def _leave(self, j: int, piece: _Piece) -> Iterator[Ready]:
        """Take the whole units out of a piece and shrink it to the others."""
        unit, _ = self._unit
        done = piece.written.complete_rows(mask(range(len(piece.columns))))
        if unit > 1:
            for units in range(0, len(piece.rows), unit):
                rows = mask(range(units, min(units + unit, len(piece.rows))))
                if done & rows != rows:
                    done &= ~rows
        if not done:
            return
        for i in self._touched(piece.rows):
            del self._owner[i, j]
        self._count(piece, -1)
        for rest in runs(mask(range(len(piece.rows))) & ~done):
            self._own(j, piece.keep(rest))
        left = list(runs(done))
        try:
            while left:
                run = left[0]
                yield Ready(
                    piece.rows[run.start : run.stop], piece.columns, piece.buffer[run.start : run.stop]
                )
                del left[0]
        finally:  # the caller could not store a unit: its elements are here only, and so are those of the next ones
            for run in left:
                self._own(j, piece.keep(run))

    def _own(self, j: int, piece: _Piece) -> None:
        self._count(piece, 1)
        for i in self._touched(piece.rows):
            self._owner[i, j] = piece

    def _count(self, piece: _Piece, sign: int) -> None:
        self._meter.add(sign * piece.buffer.numel() * piece.buffer.element_size())

    def _pieces(self) -> Iterator[_Piece]:
        yield from {id(piece): piece for piece in self._owner.values()}.values()


def _index(some: range, every: range) -> range:
    """Positions of `some` in `every`, which contains it."""
    step = some.step // every.step if len(some) > 1 else 1
    first = (some.start - every.start) // every.step
    return range(first, first + (len(some) - 1) * step + 1, max(step, 1))


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)
