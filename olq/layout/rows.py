"""Matrices stored row by row: padded rows, the parts of a fused weight, and two E2M1 codes a byte.

RowMajor  offset(r, c) = physical_row(r) * columns' + c; rows that no part owns and columns after the last are
          padding.
Nibbles   element (r, c) lies in byte r * ceil(K/2) + c/2, in the low nibble for even c, the high one for odd
          c. With K odd, the last byte of a row has 0 in its high nibble, which the writer of the low one
          writes.
Spec      docs/formats/layouts.md
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from olq.errors import LayoutError
from olq.layout.order import Cell, Fill, Order, check_sizes


@dataclass(frozen=True, slots=True)
class RowMajor(Order):
    """A matrix with padding after its columns, after its rows, and between parts of its rows.

    Args:
        rows: logical rows.
        columns: logical columns.
        padded_rows: physical rows; None is `rows`.
        padded_columns: physical columns; None is `columns`.
        value: what padding holds: 0 for codes and scale bytes, 1.0 for float32 scales.
        spans: physical rows (start, stop) of each part, ascending, `rows` in all; None is one part at the
            top.

    Raises:
        LayoutError: the physical matrix is smaller than the logical one, or the spans don't hold its rows.
    """

    padded_rows: int | None = None
    padded_columns: int | None = None
    value: float = 0
    spans: tuple[tuple[int, int], ...] | None = None

    tag: ClassVar[str] = "row_major"
    unit_bits: ClassVar[int | None] = None
    element_bits: ClassVar[int | None] = None
    padding_text: ClassVar[str] = "rows and columns beyond the logical matrix; the allocator writes them"

    def __post_init__(self) -> None:
        check_sizes(self.tag, rows=self.rows, columns=self.columns)
        spans = self.parts
        height, width = self.shape
        edges = [edge for span in spans for edge in span]
        # Neighbours, not sorted(): sizes may be symbolic while torch.compile traces.
        ascending = all(a <= b for a, b in pairwise(edges))
        fits = ascending and (not edges or (edges[0] >= 0 and edges[-1] <= height))
        if not fits or sum(stop - start for start, stop in spans) != self.rows or width < self.columns:
            raise LayoutError(
                "The physical matrix has no place for the logical one.",
                where=f"{self.tag} order",
                found=f"{self.rows}x{self.columns} in {height}x{width}, parts at rows {list(spans)}",
                need="ascending parts that hold all logical rows, inside the physical matrix",
                remedy="round the physical sizes up, not down",
            )

    @property
    def padding_value(self) -> float:
        """What each element of padding holds."""
        return self.value

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Physical rows (start, stop) of each part."""
        return ((0, self.rows),) if self.spans is None else self.spans

    @property
    def shape(self) -> tuple[int, int]:
        """Physical (rows, columns)."""
        rows = self.rows if self.padded_rows is None else self.padded_rows
        return rows, self.columns if self.padded_columns is None else self.padded_columns

    @property
    def strides(self) -> tuple[int, int]:
        """Contiguous."""
        return max(self.shape[1], 1), 1

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The physical shape."""
        return self.shape

    def physical_row(self, row: int) -> int:
        """Where a logical row lies."""
        for start, stop in self.parts:
            if row < stop - start:
                return start + row
            row -= stop - start
        self._check_coordinate(self.rows, 0)
        return row  # not reached: the check above raises

    def offset(self, row: int, column: int) -> int:
        """Position in elements."""
        self._check_coordinate(row, column)
        return self.physical_row(row) * self.shape[1] + column

    def inverse(self, position: int) -> Cell:
        """The element at a position; the coordinate of a padding cell is the physical one."""
        self._check_position(position)
        physical, column = divmod(position, self.shape[1])
        before = 0
        for start, stop in self.parts:
            if start <= physical < stop and column < self.columns:
                return Cell((before + physical - start, column), False)
            before += stop - start
        return Cell((physical, column), True)

    def fills(self) -> tuple[Fill, ...]:
        """Rows between and after the parts; columns after the last."""
        height, width = self.shape
        edges = [0, *(edge for span in self.parts for edge in span), height]
        boxes = [(gap, (0, width)) for gap in list(pairwise(edges))[::2]]
        boxes += [(span, (self.columns, width)) for span in self.parts]
        return tuple(Fill(box, self.value) for box in boxes if all(start < stop for start, stop in box))


@dataclass(frozen=True, slots=True)
class Nibbles(Order):
    """E2M1 codes, [rows, K], two a byte; a position counts nibbles, even ones are low."""

    tag: ClassVar[str] = "nibbles"
    unit_bits: ClassVar[int | None] = 4
    element_bits: ClassVar[int | None] = 8
    padding_text: ClassVar[str] = (
        "with K odd, the high nibble of a row's last byte is 0; the producer writes it"
    )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, ceil(K / 2)), in bytes."""
        return self.rows, -(-self.columns // 2)

    @property
    def strides(self) -> tuple[int, int]:
        """Contiguous, in bytes."""
        return max(self.shape[1], 1), 1

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """(rows, bytes, 2), in nibbles."""
        return *self.shape, 2

    def offset(self, row: int, column: int) -> int:
        """Position in nibbles: byte offset // 2, shifted left by 4 * (offset % 2)."""
        self._check_coordinate(row, column)
        return row * 2 * self.shape[1] + column

    def inverse(self, position: int) -> Cell:
        """The code at a nibble, or the padding cell."""
        self._check_position(position)
        row, column = divmod(position, 2 * self.shape[1])
        return Cell((row, column), column >= self.columns)

    def fills(self) -> tuple[Fill, ...]:
        """None: a padding nibble shares its byte with a code, so the producer of the code writes it."""
        return ()
