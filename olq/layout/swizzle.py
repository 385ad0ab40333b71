"""The 128x4 order of block scales, as cuBLAS, CUTLASS and flashinfer read it ("SWIZZLE_32_4_4").

Letters   R, C = rows and scale columns of one matrix; R', C' = R up to a multiple of 128, C up to a multiple
          of 4.
Equation  offset(r, c) = (r/128 * C'/4 + c/4) * 512 + r%32 * 16 + r%128/32 * 4 + c%4, in bytes.
Padding   zeros. One order for E8M0 bytes (MXFP8) and E4M3 bytes (NVFP4).
Spec      docs/formats/layouts.md
"""

from dataclasses import dataclass
from typing import ClassVar

from olq.layout.order import Cell, Fill, Order, check_sizes, round_up

TILE_ROWS = 128
TILE_COLUMNS = 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """(R', C'): shape of the bytes that hold an R x C matrix of scales."""
    return round_up(rows, TILE_ROWS), round_up(columns, TILE_COLUMNS)


def offset(row: int, column: int, columns: int) -> int:
    """Position in bytes of scale (row, column) in a matrix of `columns` scale columns. Nothing is checked."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def coordinate(position: int, columns: int) -> tuple[int, int]:
    """(row, column) in the padded matrix of a byte: the inverse of `offset`. Nothing is checked."""
    tile, inside = divmod(position, 512)
    tile_row, tile_column = divmod(tile, -(-columns // 4))
    row_in_quarter, quarter, column = inside // 16, inside % 16 // 4, inside % 4
    return tile_row * 128 + quarter * 32 + row_in_quarter, tile_column * 4 + column


@dataclass(frozen=True, slots=True)
class Swizzle128x4(Order):
    """Scale bytes of one matrix in 128x4 order.

    Args:
        rows: R, rows of the operand.
        columns: C, scales along K.
        extra_tiles: whole row tiles after the last one, for schedulers that visit more tiles than the matrix
            has.
    """

    extra_tiles: int = 0

    tag: ClassVar[str] = "swizzled_128x4"
    unit_bits: ClassVar[int | None] = 8
    element_bits: ClassVar[int | None] = 8
    padding_text: ClassVar[str] = "rows and columns after the last hold 0; the allocator writes them"

    def __post_init__(self) -> None:
        check_sizes(self.tag, rows=self.rows, columns=self.columns, extra_tiles=self.extra_tiles)

    @property
    def shape(self) -> tuple[int, int]:
        """(R', C'), extra tiles included."""
        rows, columns = padded_shape(self.rows, self.columns)
        return rows + TILE_ROWS * self.extra_tiles, columns

    @property
    def strides(self) -> tuple[int, int]:
        """Contiguous; the coordinates of this tensor are not those of the scales."""
        return max(self.shape[1], 1), 1

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """(row tile, column tile, row % 32, row % 128 / 32, column % 4)."""
        rows, columns = self.shape
        return rows // 128, columns // 4, 32, 4, 4

    def offset(self, row: int, column: int) -> int:
        """Position in bytes of scale (row, column)."""
        self._check_coordinate(row, column)
        return offset(row, column, self.columns)

    def inverse(self, position: int) -> Cell:
        """The scale at a byte, or the padding cell."""
        self._check_position(position)
        row, column = coordinate(position, self.columns)
        return Cell((row, column), row >= self.rows or column >= self.columns)

    def fills(self) -> tuple[Fill, ...]:
        """Columns after the last; the rest of the last row tile, in two boxes; extra row tiles."""
        row_tiles, column_tiles, *_ = self.storage_shape
        full, rest = divmod(self.rows, 128)
        quarter, row = divmod(rest, 32)
        boxes = []
        if self.columns % 4:
            last = (column_tiles - 1, column_tiles)
            boxes.append(((0, row_tiles), last, (0, 32), (0, 4), (self.columns % 4, 4)))
        if rest:
            here = ((full, full + 1), (0, column_tiles))
            boxes.append((*here, (row, 32), (quarter, quarter + 1), (0, 4)))
            boxes.append((*here, (0, 32), (quarter + 1, 4), (0, 4)))
        boxes.append(((row_tiles - self.extra_tiles, row_tiles), (0, column_tiles), (0, 32), (0, 4), (0, 4)))
        return tuple(
            Fill(box, self.padding_value) for box in boxes if all(start < stop for start, stop in box)
        )
