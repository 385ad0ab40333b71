"""What one loader call has written onto one parameter so far."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from olq.reload.ledger import storage_key
from olq.reload.region import Box, intersect, slices
from olq.reload.views import mask_boxes, span

#: More boxes than this in one call go to memory of their own, to arrive as one.
_MOST_BOXES = 64


class Writes:
    """Writes in order, the last one winning.

    Usually a list of (box, source) without a copy. Memory of the touched rows takes over when a write is not a box,
    overlaps an earlier one in part, comes after many others, or when the loader reads back.

    Args:
        parameter: gives shape and strides, which are contiguous.
        dtype: to which values are rounded when they are copied.
        device: where copies live.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self._parameter, self._dtype, self._device = parameter, dtype, device
        self._pending: list[tuple[Box, Tensor]] = []
        self._window: _Window | None = None

    @property
    def buffered(self) -> bool:
        """Whether memory of the touched rows has taken over."""
        return self._window is not None

    def put(self, box: Box, source: Tensor) -> None:
        """Add a write; `source` has the box's shape and is kept until the call ends."""
        if self._window is None and len(self._pending) < _MOST_BOXES:
            kept = [(old, tensor) for old, tensor in self._pending if old != box]
            if not any(_touch(old, box) for old, _ in kept):
                self._pending = [*kept, (box, source)]
                return
        self._memory(box[0]).put(box, source)

    def through(
        self,
        view: Tensor,
        write: Callable[[Tensor], Any],
        mask: Callable[[Tensor], Any] | None,
        check: Callable[[Box], None],
    ) -> None:
        """Write through a view's strides.

        Args:
            view: of the parameter.
            write: is given real memory of the view's geometry.
            mask: does the same to booleans with True for its values; None stands for all of the view.
            check: called for each box that is written, before it is.
        """
        rows = self._rows_of(view)
        window = self._memory(rows)
        fresh = window.shown(view, mask)
        for first, *rest in mask_boxes(fresh):
            check((range(first.start + window.rows.start, first.stop + window.rows.start, first.step), *rest))
        write(window.same_view(window.values, view))
        window.written |= fresh

    def read(self, view: Tensor) -> Tensor | None:
        """A view's values, in memory that may be written, or None if some of them were not written in this call."""
        window = self._memory(self._rows_of(view))
        if not bool(window.same_view(window.written, view).all()):
            return None
        return window.same_view(window.values, view)

    def snapshot(self, storage: int) -> None:
        """Copy the sources that live in a storage which is about to be overwritten."""
        self._pending = [
            (box, source.clone() if storage_key(source) == storage else source)
            for box, source in self._pending
        ]

    def arrivals(self) -> Iterator[tuple[Box, Tensor]]:
        """Disjoint (box, source) with the values that won."""
        if self._window is None:
            yield from self._pending
        else:
            yield from self._window.arrivals()

    def _rows_of(self, view: Tensor) -> range:
        """The rows (indices of the first dimension) between a view's first and last element."""
        row = max(int(self._parameter.stride(0)), 1) * view.dtype.itemsize
        first, last = (at - span(self._parameter)[0] for at in span(view))
        return range(first // row, -(-last // row))

    def _memory(self, rows: range) -> "_Window":
        """Memory that holds these rows beside those that it holds already."""
        if self._window is None:
            pending = [box[0] for box, _ in self._pending if len(box[0])]
            start = min([rows.start, *(r.start for r in pending)])
            stop = max([rows[-1] + 1, *(r[-1] + 1 for r in pending)])
            self._window = _Window(self._parameter, range(start, stop), self._dtype, self._device)
            for box, source in self._pending:
                self._window.put(box, source)
            self._pending = []
        elif rows.start < self._window.rows.start or rows[-1] >= self._window.rows.stop:
            self._window = self._window.grown(rows)
        return self._window


class _Window:
    """Memory of some neighbouring rows, and the mask of those of its elements that have been written."""

    def __init__(self, parameter: Tensor, rows: range, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self._parameter = rows, parameter
        shape = (len(rows), *parameter.shape[1:])
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.written = torch.zeros(shape, dtype=torch.bool, device=device)
        self._offset = parameter.storage_offset() + rows.start * prod(shape[1:])

    def put(self, box: Box, source: Tensor) -> None:
        at = slices(
            (range(box[0].start - self.rows.start, box[0].stop - self.rows.start, box[0].step), *box[1:])
        )
        self.values[at] = source
        self.written[at] = True

    def same_view(self, tensor: Tensor, view: Tensor) -> Tensor:
        """The view of `tensor`, which is `values` or `written`, that `view` is of the parameter."""
        return tensor.as_strided(view.shape, view.stride(), view.storage_offset() - self._offset)

    def shown(self, view: Tensor, mask: Callable[[Tensor], Any] | None) -> Tensor:
        """Booleans of the window's shape: what a write onto `view` covers."""
        fresh = torch.zeros_like(self.written)
        part = self.same_view(fresh, view)
        if mask is None:
            part.fill_(True)
        else:
            mask(part)
        return fresh

    def grown(self, rows: range) -> "_Window":
        """A window with other rows too; at least twice as large, so that a loop over rows copies each a few times."""
        start, stop = min(self.rows.start, rows.start), max(self.rows.stop, rows[-1] + 1)
        if stop > self.rows.stop:
            stop = min(max(stop, start + 2 * len(self.rows)), self._parameter.shape[0])
        if start < self.rows.start:
            start = max(min(start, stop - 2 * len(self.rows)), 0)
        larger = _Window(self._parameter, range(start, stop), self.values.dtype, self.values.device)
        own = slice(self.rows.start - start, self.rows.stop - start)
        larger.values[own], larger.written[own] = self.values, self.written
        return larger

    def arrivals(self) -> Iterator[tuple[Box, Tensor]]:
        for first, *rest in mask_boxes(self.written):
            box = (range(first.start + self.rows.start, first.stop + self.rows.start, first.step), *rest)
            yield box, self.values[slices((first, *rest))]


def _touch(a: Box, b: Box) -> bool:
    return all(intersect(x, y) for x, y in zip(a, b, strict=True))
