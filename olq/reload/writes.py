"""What one loader call has written onto one parameter so far."""

from collections.abc import Iterator

import torch
from torch import Tensor

from olq.reload.ledger import storage_key
from olq.reload.region import Box, intersect, slices
from olq.reload.views import mask_boxes


class Writes:
    """Writes in order, the last one winning.

    Usually a list of (box, source) without a copy. A buffer of the whole parameter takes over when a write is not a
    box, overlaps an earlier one in part, or when the loader reads back.

    Args:
        parameter: gives shape, strides and dtype.
        device: where a buffer would live.
    """

    def __init__(self, parameter: Tensor, device: torch.device) -> None:
        self._parameter, self._device = parameter, device
        self._pending: list[tuple[Box, Tensor]] = []
        self._buffer: tuple[Tensor, Tensor] | None = None

    @property
    def buffered(self) -> bool:
        """Whether the buffer has taken over."""
        return self._buffer is not None

    def put(self, box: Box, source: Tensor) -> None:
        """Add a write; `source` has the box's shape and is kept until the call ends."""
        kept = [(old, tensor) for old, tensor in self._pending if old != box]
        if self._buffer is None and not any(_touch(old, box) for old, _ in kept):
            self._pending = [*kept, (box, source)]
            return
        buffer, mask = self.buffer()
        buffer[slices(box)] = source
        mask[slices(box)] = True

    def snapshot(self, storage: int) -> None:
        """Copy the sources that live in a storage which is about to be overwritten."""
        self._pending = [
            (box, source.clone() if storage_key(source) == storage else source)
            for box, source in self._pending
        ]

    def buffer(self) -> tuple[Tensor, Tensor]:
        """Memory of the whole parameter with the values so far, and the mask of elements that have one."""
        if self._buffer is None:
            shape, stride = self._parameter.shape, self._parameter.stride()
            buffer = torch.empty_strided(shape, stride, dtype=self._parameter.dtype, device=self._device)
            mask = torch.empty_strided(shape, stride, dtype=torch.bool, device=self._device).fill_(False)
            for box, source in self._pending:
                buffer[slices(box)] = source
                mask[slices(box)] = True
            self._pending, self._buffer = [], (buffer, mask)
        return self._buffer

    def arrivals(self) -> Iterator[tuple[Box, Tensor]]:
        """Disjoint (box, source) with the values that won."""
        if self._buffer is None:
            yield from self._pending
            return
        buffer, mask = self._buffer
        for box in mask_boxes(mask):
            yield box, buffer[slices(box)]


def _touch(a: Box, b: Box) -> bool:
    return all(intersect(x, y) for x, y in zip(a, b, strict=True))
