"""Scales stored column by column, each column 16-byte aligned: what DeepGEMM's TMA descriptors read.

Letters   MN = rows of the operand, G = scale groups along K, A = MN up to a multiple of 4, W = ceil(G / 4)
          words.
MNMajor     float32 [MN, G], strides (1, A); a batch repeats every A * G elements. Rows MN..A hold 1.0.
UE8M0Words  int32 [MN, W], strides (1, A); word w of a row holds the exponents of groups 4w..4w+3,
            little-endian; a batch repeats every A * W words. Groups after the last and rows MN..A hold 0.
Spec        docs/formats/layouts.md
"""

from dataclasses import dataclass
from typing import ClassVar

from olq.layout.order import Cell, Fill, Order, round_up

#: Rows that share one scale of a 128x128 weight block: row r takes the scale of block row r // 128.
BLOCK_ROWS = 128


def aligned_rows(rows: int) -> int:
    """A: `rows` up to 16 bytes of 4-byte elements."""
    return round_up(rows, 4)


def block_row(row: int) -> int:
    """The block row whose scale a row of a 128x128-scaled weight repeats."""
    return row // BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class MNMajor(Order):
    """Float32 scales, [MN, G], stored column by column."""

    tag: ClassVar[str] = "mn_major"
    unit_bits: ClassVar[int | None] = 32
    element_bits: ClassVar[int | None] = 32
    padding_text: ClassVar[str] = "rows up to a multiple of 4 hold 1.0; the allocator writes them"

    @property
    def padding_value(self) -> float:
        """1.0: a decode scale that kernels which read padding can decode and pack."""
        return 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """(MN, G)."""
        return self.rows, self.columns

    @property
    def strides(self) -> tuple[int, int]:
        """(1, A), in elements."""
        return 1, aligned_rows(self.rows)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """(G, A)."""
        return self.columns, aligned_rows(self.rows)

    def offset(self, row: int, column: int) -> int:
        """Position in elements of scale (row, column)."""
        self._check_coordinate(row, column)
        return column * aligned_rows(self.rows) + row

    def inverse(self, position: int) -> Cell:
        """The scale at an element, or the padding cell."""
        self._check_position(position)
        column, row = divmod(position, aligned_rows(self.rows))
        return Cell((row, column), row >= self.rows)

    def fills(self) -> tuple[Fill, ...]:
        """The rows after the last."""
        aligned = aligned_rows(self.rows)
        if aligned == self.rows or not self.columns:
            return ()
        return (Fill(((0, self.columns), (self.rows, aligned)), self.padding_value),)


@dataclass(frozen=True, slots=True)
class UE8M0Words(Order):
    """Scale exponents, [MN, G] bytes, four to an int32; words stored column by column."""

    tag: ClassVar[str] = "ue8m0_words"
    unit_bits: ClassVar[int | None] = 8
    element_bits: ClassVar[int | None] = 32
    padding_text: ClassVar[str] = (
        "groups and rows up to a multiple of 4 hold exponent 0; the allocator writes them"
    )

    @property
    def shape(self) -> tuple[int, int]:
        """(MN, W), in words."""
        return self.rows, -(-self.columns // 4)

    @property
    def strides(self) -> tuple[int, int]:
        """(1, A), in words."""
        return 1, aligned_rows(self.rows)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """(W, A, 4), in bytes."""
        return -(-self.columns // 4), aligned_rows(self.rows), 4

    def offset(self, row: int, column: int) -> int:
        """Position in bytes of the exponent of (row, group)."""
        self._check_coordinate(row, column)
        return (column // 4 * aligned_rows(self.rows) + row) * 4 + column % 4

    def inverse(self, position: int) -> Cell:
        """The exponent at a byte, or the padding cell."""
        self._check_position(position)
        word, lane = divmod(position, 4)
        word_column, row = divmod(word, aligned_rows(self.rows))
        column = word_column * 4 + lane
        return Cell((row, column), row >= self.rows or column >= self.columns)

    def fills(self) -> tuple[Fill, ...]:
        """Rows after the last, and lanes after the last group."""
        words, aligned, _ = self.storage_shape
        rows = ((0, words), (self.rows, aligned), (0, 4))
        lanes = ((words - 1, words), (0, aligned), (self.columns % 4, 4))
        boxes = [rows] if aligned > self.rows and words else []
        boxes += [lanes] if self.columns % 4 and aligned else []
        return tuple(Fill(box, self.padding_value) for box in boxes)
