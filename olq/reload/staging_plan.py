"""Which bytes of files are read when, and where they go: integers only.

    fill    what one of the two buffers holds at a time: a range of one file, at most a buffer long
    piece   what one thread reads at a time: a range of a fill
    part    bytes of one tensor inside a piece

Ranges are cut without regard to tensors: many small neighbours are one read, a tensor larger than a buffer is several
fills. Order is file order throughout.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from olq.reload.headers import Entry, Header

#: Most bytes of one read: large enough that a call costs nothing, small enough that threads share a buffer evenly.
PIECE_BYTES = 8 << 20

#: Names of dtypes in a header whose bytes are those of a torch dtype.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one tensor in one piece.

    Args:
        tensor: its number, over all files.
        into: where they go in the tensor.
        at: where they lie in the buffer.
        size: how many.
    """

    tensor: int
    into: int
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One read.

    Args:
        file: number of the file.
        offset: where it begins in the file.
        fill: number of the fill; its buffer is this modulo 2.
        at: where it goes in the buffer.
        size: its bytes.
        parts: the tensors in it.
    """

    file: int
    offset: int
    fill: int
    at: int
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """All reads of a load.

    Args:
        pieces: in file order.
        fills: pieces of each fill.
        buffer_bytes: size that a buffer needs: that of the largest fill.
    """

    pieces: tuple[Piece, ...]
    fills: tuple[int, ...]
    buffer_bytes: int


def plan_reads(headers: Sequence[Header], buffer_bytes: int, piece_bytes: int = PIECE_BYTES) -> Reads:
    """Cut files into fills and pieces.

    Args:
        headers: the files.
        buffer_bytes: most bytes of a fill.
        piece_bytes: most bytes of a piece.
    """
    pieces: list[Piece] = []
    fills: list[int] = []
    largest = before = 0
    for number, header in enumerate(headers):
        entries = header.entries
        if entries:
            numbered = _Numbered(entries, before)
            for start, stop in _cut(entries[0].start, entries[-1].stop, buffer_bytes):
                largest = max(largest, stop - start)
                fills.append(0)
                for first, last in _cut(start, stop, piece_bytes):
                    parts = tuple(numbered.parts(first, last, first - start))
                    pieces.append(Piece(number, first, len(fills) - 1, first - start, last - first, parts))
                    fills[-1] += 1
        before += len(entries)
    return Reads(tuple(pieces), tuple(fills), largest)


class _Numbered:
    """Tensors of one file, asked for by ranges that go forward."""

    def __init__(self, entries: Sequence[Entry], before: int) -> None:
        self._entries, self._before, self._first = entries, before, 0

    def parts(self, start: int, stop: int, at: int) -> Iterator[Part]:
        """Parts of the tensors with bytes in a range, which lies at `at` in the buffer."""
        entries = self._entries
        while self._first < len(entries) and entries[self._first].stop <= start:
            self._first += 1
        for i in range(self._first, len(entries)):
            entry = entries[i]
            if entry.start >= stop:
                return
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                yield Part(self._before + i, first - entry.start, at + first - start, last - first)


def _cut(start: int, stop: int, most: int) -> Iterable[tuple[int, int]]:
    return ((first, min(first + most, stop)) for first in range(start, stop, most))
