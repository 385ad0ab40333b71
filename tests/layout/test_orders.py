"""Every order is a bijection with defined padding: one test body for all orders, and planted wrong maps."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from olq.errors import LayoutError
from olq.layout import Fill, MNMajor, Nibbles, Order, RowMajor, Swizzle128x4, UE8M0Words

ROWS = st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 127, 128, 129, 160, 200, 257]))
COLUMNS = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17]))


@st.composite
def row_majors(draw: st.DrawFn) -> RowMajor:
    """Up to four parts, each at a place of its own, with gaps before, between and after."""
    spans, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = at + draw(st.integers(0, 3))
        at = start + draw(st.integers(0, 5))
        spans.append((start, at))
    columns = draw(st.integers(0, 6))
    height, width = at + draw(st.integers(0, 3)), columns + draw(st.integers(0, 3))
    rows = sum(stop - start for start, stop in spans)
    return RowMajor(rows, columns, height, width, 1.0, tuple(spans))


ORDERS: st.SearchStrategy[Order] = st.one_of(
    st.builds(Swizzle128x4, ROWS, COLUMNS, st.sampled_from([0, 0, 1, 2])),
    st.builds(MNMajor, ROWS, COLUMNS),
    st.builds(UE8M0Words, ROWS, COLUMNS),
    st.builds(Nibbles, ROWS, COLUMNS),
    row_majors(),
)


def faults(order: Order) -> list[str]:
    """What is wrong with a map, in words; nothing for a right one."""
    found = []
    logical = {}
    for row, column in product(range(order.rows), range(order.columns)):
        at = order.offset(row, column)
        if not 0 <= at < order.extent:
            found.append(f"({row}, {column}) lies at {at}, outside the storage")
        elif at in logical:
            found.append(f"({row}, {column}) and {logical[at]} share position {at}")
        elif order.inverse(at) != ((row, column), False):
            found.append(f"({row}, {column}) lies at {at}, where {order.inverse(at)} is")
        logical[at] = (row, column)
    padding = {at for at in range(order.extent) if order.inverse(at).padding}
    if padding != set(range(order.extent)) - set(logical):
        found.append("what `inverse` calls padding is not what `offset` leaves")
    cells = [order.inverse(at).coordinate for at in padding]
    if len(set(cells)) != len(cells):
        found.append("two padding positions have one coordinate")
    filled = set()
    for fill in order.fills():
        filled |= positions(fill, order.storage_shape)
        if fill.value != order.padding_value:
            found.append(f"padding holds {fill.value} and {order.padding_value}")
    # A padding nibble has no byte of its own: the producer of its neighbour writes it.
    if filled != (set() if order.unit_bits == 4 else padding):
        found.append(
            f"fills miss {sorted(padding - filled)[:3]} and write over {sorted(filled - padding)[:3]}"
        )
    return found


def positions(fill: Fill, shape: tuple[int, ...]) -> set[int]:
    """Positions in a box of a contiguous storage."""
    found = set()
    for index in product(*(range(start, stop) for start, stop in fill.box)):
        at = 0
        for i, size in zip(index, shape, strict=True):
            at = at * size + i
        found.add(at)
    return found


@given(ORDERS)
def test_an_order_is_a_bijection_and_its_fills_are_its_padding(order: Order):
    event(order.tag)
    assert faults(order) == []


@given(ORDERS)
def test_strides_and_storage_agree(order: Order):
    bits, element = order.unit_bits or 32, order.element_bits or 32
    (height, width), (down, across) = order.shape, order.strides
    if height and width:
        reached = (height - 1) * down + (width - 1) * across + 1
        assert reached <= order.extent * bits // element
    assert order.extent * bits % element == 0


# Wrong maps that have been written in earnest. Each differs from the right one in one place.


class ForgetsToRoundUp(Swizzle128x4):
    tag: ClassVar[str] = "columns / 4, floored"

    def offset(self, row: int, column: int) -> int:
        tile = row // 128 * (self.columns // 4) + column // 4
        return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


class SwapsQuarters(Swizzle128x4):
    tag: ClassVar[str] = "rows of a tile in order"

    def offset(self, row: int, column: int) -> int:
        tile = row // 128 * -(-self.columns // 4) + column // 4
        return tile * 512 + row % 128 * 4 + column % 4


class LeavesColumnsStale(Swizzle128x4):
    tag: ClassVar[str] = "fills rows only"

    def fills(self) -> tuple[Fill, ...]:
        return tuple(fill for fill in Swizzle128x4.fills(self) if fill.box[-1] == (0, 4))


class FillsTooMuch(MNMajor):
    tag: ClassVar[str] = "fills the last row too"

    def fills(self) -> tuple[Fill, ...]:
        return (Fill(((0, self.columns), (self.rows - 1, self.storage_shape[1])), 1.0),)


class Unaligned(MNMajor):
    tag: ClassVar[str] = "columns follow each other"

    def offset(self, row: int, column: int) -> int:
        return column * self.rows + row


class PadsWithOnes(MNMajor):
    tag: ClassVar[str] = "two values for padding"

    def fills(self) -> tuple[Fill, ...]:
        return tuple(Fill(fill.box, 0.0) for fill in MNMajor.fills(self))


class BigEndian(UE8M0Words):
    tag: ClassVar[str] = "first exponent in the highest byte"

    def offset(self, row: int, column: int) -> int:
        return (column // 4 * self.storage_shape[1] + row) * 4 + 3 - column % 4


class HighNibbleFirst(Nibbles):
    tag: ClassVar[str] = "high nibble first"

    def offset(self, row: int, column: int) -> int:
        return row * 2 * self.shape[1] + (column ^ 1)


class PacksAcrossRows(Nibbles):
    tag: ClassVar[str] = "odd rows share a byte"

    def offset(self, row: int, column: int) -> int:
        return row * self.columns + column


WRONG = [
    ForgetsToRoundUp(200, 7),
    SwapsQuarters(64, 4),
    LeavesColumnsStale(128, 3),
    FillsTooMuch(7, 2),
    Unaligned(7, 2),
    PadsWithOnes(7, 2),
    BigEndian(4, 4),
    HighNibbleFirst(1, 4),
    PacksAcrossRows(2, 3),
]


@pytest.mark.parametrize("order", WRONG, ids=lambda order: order.tag)
def test_a_planted_wrong_map_is_caught(order: Order):
    assert faults(order)


@dataclass(frozen=True)
class Golden:
    """Offsets known from elsewhere, by coordinate."""

    order: Order
    offsets: dict[tuple[int, int], int]


GOLDENS = [
    # cuBLAS and flashinfer, eight columns: the eight known places.
    Golden(
        Swizzle128x4(256, 8),
        {
            (0, 0): 0,
            (0, 1): 1,
            (1, 0): 16,
            (32, 0): 4,
            (31, 0): 496,
            (127, 3): 511,
            (0, 4): 512,
            (128, 0): 1024,
            (255, 7): 2047,
        },
    ),
    # An mxfp8 weight of 128 x 64: two columns of scales, padded to four.
    Golden(Swizzle128x4(128, 2), {(1, 0): 16, (32, 0): 4, (0, 1): 1}),
    Golden(Nibbles(2, 3), {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 4}),
    Golden(MNMajor(7, 3), {(0, 0): 0, (6, 0): 6, (0, 1): 8, (6, 2): 22}),
    # Bytes: group 4 of row 0 opens the second column of words, 132 words (MN = 130, aligned) after the first.
    Golden(UE8M0Words(130, 32), {(0, 0): 0, (0, 3): 3, (1, 0): 4, (0, 4): 528, (129, 31): 7 * 528 + 519}),
]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.order.tag)
def test_known_offsets(golden: Golden):
    assert {at: golden.order.offset(*at) for at in golden.offsets} == golden.offsets


@pytest.mark.parametrize(
    ("order", "shape", "strides", "extent"),
    [
        (Swizzle128x4(200, 7), (256, 8), (8, 1), 2048),
        (Swizzle128x4(5, 4, extra_tiles=2), (384, 4), (4, 1), 1536),
        (MNMajor(7, 32), (7, 32), (1, 8), 256),
        (MNMajor(130, 32), (130, 32), (1, 132), 4224),
        (UE8M0Words(7, 32), (7, 8), (1, 8), 256),
        (UE8M0Words(130, 31), (130, 8), (1, 132), 4224),
        (Nibbles(3, 5), (3, 3), (3, 1), 18),
        (RowMajor(20, 5, padded_rows=32, padded_columns=8), (32, 8), (8, 1), 256),
    ],
    ids=lambda value: getattr(value, "tag", None),
)
def test_known_shapes_strides_and_extents(order: Order, shape, strides, extent):
    assert (order.shape, order.strides, order.extent) == (shape, strides, extent)


def test_a_padding_position_is_named_as_such():
    assert Swizzle128x4(5, 3).inverse(3) == ((0, 3), True)
    assert Swizzle128x4(5, 3).inverse(4) == ((32, 0), True)
    assert MNMajor(7, 3).inverse(7) == ((7, 0), True)
    assert Nibbles(1, 3).inverse(3) == ((0, 3), True)
    assert RowMajor(2, 1, padded_rows=4, spans=((1, 3),)).inverse(0) == ((0, 0), True)
    assert RowMajor(2, 1, padded_rows=4, spans=((1, 3),)).inverse(1) == ((0, 0), False)


@given(ORDERS, st.integers(-2, 2))
def test_coordinates_and_positions_outside_raise(order: Order, by: int):
    outside = [(order.rows + abs(by), 0), (0, order.columns + abs(by)), (-1 - abs(by), 0)]
    for row, column in outside:
        with pytest.raises(LayoutError, match="lies outside the matrix"):
            order.offset(row, column)
    for position in (order.extent + abs(by), -1 - abs(by)):
        with pytest.raises(LayoutError, match="lies outside the storage"):
            order.inverse(position)


def test_messages_name_the_size_and_the_place():
    with pytest.raises(LayoutError) as caught:
        Swizzle128x4(-1, 4)
    assert str(caught.value) == (
        "A size can't be negative.\n"
        "  where:  swizzled_128x4 order\n"
        "  found:  rows = -1\n"
        "  need:   rows >= 0\n"
        "  remedy: pass the logical extent of the matrix"
    )
    with pytest.raises(LayoutError) as caught:
        RowMajor(20, 8, padded_rows=16)
    assert str(caught.value) == (
        "The physical matrix has no place for the logical one.\n"
        "  where:  row_major order\n"
        "  found:  20x8 in 16x8, parts at rows [(0, 20)]\n"
        "  need:   ascending parts that hold all logical rows, inside the physical matrix\n"
        "  remedy: round the physical sizes up, not down"
    )
