"""What every order answers: extent, offset, inverse, shape, strides, and what its padding holds.

A *position* counts units from the start of one matrix's storage. The unit is an element of the tensor, a
byte, or a nibble; `unit_bits` says which. Leading dimensions (experts, a batch) repeat the storage of one
matrix back to back.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

from olq.errors import LayoutError


class Cell(NamedTuple):
    """What lies at a position.

    Args:
        coordinate: (row, column) in the padded matrix; a padding cell's lies outside the logical one.
        padding: True where no logical element lies.
    """

    coordinate: tuple[int, int]
    padding: bool


class Fill(NamedTuple):
    """A box of padding: (start, stop) per dimension of `Order.storage_shape`, and what each unit holds."""

    box: tuple[tuple[int, int], ...]
    value: float


@dataclass(frozen=True, slots=True)
class Order(ABC):
    """One logical matrix, [rows, columns], and how it is stored.

    Raises:
        LayoutError: a size is negative.
    """

    rows: int
    columns: int

    tag: ClassVar[str]  #: name of the order in specs, tags and messages
    unit_bits: ClassVar[int | None]  #: bits of a unit: 4, 8, 32, or None: an element, whatever its dtype
    element_bits: ClassVar[int | None]  #: bits of an element of the tensor, or None: any
    padding_text: ClassVar[str]  #: the same in words, with the writer

    def __post_init__(self) -> None:
        check_sizes(self.tag, rows=self.rows, columns=self.columns)

    @property
    def padding_value(self) -> float:
        """What each unit of padding holds."""
        return 0

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Shape of the tensor that holds one matrix."""

    @property
    @abstractmethod
    def strides(self) -> tuple[int, int]:
        """Strides of that tensor, in elements."""

    @property
    @abstractmethod
    def storage_shape(self) -> tuple[int, ...]:
        """One matrix's storage as a contiguous box of units, in which padding is a union of boxes."""

    @property
    def extent(self) -> int:
        """Units of one matrix's storage, padding included: the stride of a leading dimension, in units."""
        return prod(self.storage_shape)

    @abstractmethod
    def offset(self, row: int, column: int) -> int:
        """Position of a logical element.

        Raises:
            LayoutError: the coordinate lies outside the matrix.
        """

    @abstractmethod
    def inverse(self, position: int) -> Cell:
        """What lies at a position; the inverse of `offset`.

        Raises:
            LayoutError: the position lies outside the storage.
        """

    @abstractmethod
    def fills(self) -> tuple[Fill, ...]:
        """Boxes that together are all padding which has units of its own."""

    def _check_coordinate(self, row: int, column: int) -> None:
        if not (0 <= row < self.rows and 0 <= column < self.columns):
            raise LayoutError(
                "A coordinate lies outside the matrix.",
                where=f"{self.tag} order",
                found=f"row {row}, column {column}",
                need=f"0 <= row < {self.rows} and 0 <= column < {self.columns}",
                remedy="pass logical coordinates; `inverse` names padding cells",
            )

    def _check_position(self, position: int) -> None:
        if not 0 <= position < self.extent:
            raise LayoutError(
                "A position lies outside the storage of one matrix.",
                where=f"{self.tag} order of a {self.rows}x{self.columns} matrix",
                found=f"position {position}",
                need=f"0 <= position < {self.extent}",
                remedy="take the position modulo `extent`: leading dimensions repeat the storage",
            )


def check_sizes(tag: str, **sizes: int) -> None:
    """Raise `LayoutError` for a negative size."""
    for name, size in sizes.items():
        if size < 0:
            raise LayoutError(
                "A size can't be negative.",
                where=f"{tag} order",
                found=f"{name} = {size}",
                need=f"{name} >= 0",
                remedy="pass the logical extent of the matrix",
            )


def round_up(value: int, multiple: int) -> int:
    """Least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
