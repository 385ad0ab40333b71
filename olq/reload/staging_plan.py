"""Which bytes of files are read when, and where they go: integers only.

    piece   what one thread reads at a time: a range of one file
    slot    where a piece lies until it has been copied: a share of one of the two buffers; pieces take slots in turn
    part    bytes of one tensor inside a piece

Ranges are cut without regard to tensors: many small neighbours are one read, a large tensor is several. Order is file
order throughout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from olq.reload.headers import Entry, Header

#: Most bytes of one read: so many that the interpreter's lock, which each read takes a few times, is free for others.
PIECE_BYTES = 16 << 20
#: Least slots of a buffer, if it has that many bytes: threads read into some while others are copied from.
SLOTS = 8

#: Names of dtypes in a header, and the torch dtype with the same elements in the same bytes. F4 is not here: an element
#: of torch's dtype is two of the file's.
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
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one tensor in one piece.

    Args:
        tensor: its number, over all files.
        into: where they go in the tensor.
        at: where they lie in the piece.
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
        number: over all files; its slot is this modulo the number of slots.
        file: number of the file.
        offset: where it begins in the file.
        size: its bytes.
        parts: the tensors in it.
    """

    number: int
    file: int
    offset: int
    size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """All reads of a load.

    Args:
        pieces: in file order.
        slot_bytes: size of the largest piece.
        slots: of each buffer.
    """

    pieces: tuple[Piece, ...]
    slot_bytes: int
    slots: int


def plan_reads(headers: Sequence[Header], buffer_bytes: int, piece_bytes: int | None = None) -> Reads:
    """Cut files into pieces.

    Args:
        headers: the files.
        buffer_bytes: most bytes of a buffer.
        piece_bytes: most bytes of a piece; None is the smaller of `PIECE_BYTES` and a share of the buffer.
    """
    most = piece_bytes or max(min(PIECE_BYTES, buffer_bytes // SLOTS), 1)
    most = min(most, buffer_bytes)
    pieces: list[Piece] = []
    before = 0
    for file, header in enumerate(headers):
        entries = header.entries
        if entries:
            numbered = _Numbered(entries, before)
            for start in range(entries[0].start, entries[-1].stop, most):
                size = min(most, entries[-1].stop - start)
                parts = tuple(numbered.parts(start, start + size))
                pieces.append(Piece(len(pieces), file, start, size, parts))
        before += len(entries)
    largest = max((piece.size for piece in pieces), default=1)
    return Reads(tuple(pieces), largest, min(buffer_bytes // largest, max(len(pieces), 1)))


class _Numbered:
    """Tensors of one file, asked for by ranges that go forward."""

    def __init__(self, entries: Sequence[Entry], before: int) -> None:
        self._entries, self._before, self._first = entries, before, 0

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Parts of the tensors with bytes in a range, which is a piece."""
        entries = self._entries
        while self._first < len(entries) and entries[self._first].stop <= start:
            self._first += 1
        for i in range(self._first, len(entries)):
            entry = entries[i]
            if entry.start >= stop:
                return
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                yield Part(self._before + i, first - entry.start, first - start, last - first)
