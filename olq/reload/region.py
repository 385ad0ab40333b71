"""Regions of a parameter and the set of elements that have arrived.

Box        one `range` a dimension: the elements whose index lies in every range. What a single copy writes.
Coverage   a set of elements, kept as disjoint products of index sets. An index set is an integer used as a bit set:
           unions, intersections and comparisons of 28,672 rows cost well under a microsecond, a strided region costs
           what a contiguous one costs, and neighbours merge into one product whenever they differ in one dimension.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import product as cartesian
from math import gcd, prod

Box = tuple[range, ...]
Masks = tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple(range(n) for n in shape)


def size(box: Box) -> int:
    """Number of elements of a box."""
    return prod(map(len, box))


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index into a tensor."""
    return tuple(slice(r.start, r.stop, r.step) for r in box)


def describe(box: Box) -> str:
    """The box as it would be written in Python: [0:64, ::2]."""
    return "[" + ", ".join(f"{r.start}:{r.stop}" + (f":{r.step}" if r.step != 1 else "") for r in box) + "]"


@lru_cache(maxsize=4096)
def mask(indices: range) -> int:
    """A range as a bit set."""
    count = len(indices)
    if indices.step == 1 or count <= 1:
        return ((1 << count) - 1) << indices.start if count else 0
    ones = ((1 << (count * indices.step)) - 1) // ((1 << indices.step) - 1)
    return ones << indices.start


def masks(box: Box) -> Masks:
    """A box as a product of bit sets."""
    return tuple(map(mask, box))


def runs(bits: int) -> Iterator[range]:
    """A bit set as its maximal runs of neighbours, in order."""
    start = 0
    while bits:
        gap = (bits & -bits).bit_length() - 1
        start, bits = start + gap, bits >> gap
        count = (~bits & (bits + 1)).bit_length() - 1
        yield range(start, start + count)
        start, bits = start + count, bits >> count


def boxes(product: Masks) -> Iterator[Box]:
    """A product of bit sets as boxes."""
    return cartesian(*(tuple(runs(bits)) for bits in product))


def intersect(a: range, b: range) -> range:
    """Indices in both ranges. Steps are positive."""
    if a.step == b.step == 1:
        return range(max(a.start, b.start), max(min(a.stop, b.stop), max(a.start, b.start)))
    if not a or not b:
        return range(0)
    first = next((i for i in a[: b.step] if i >= b.start and (i - b.start) % b.step == 0), None)
    if first is None:  # the first common index can lie beyond the first b.step indices when b starts later
        later = a[max(0, -(-(b.start - a.start) // a.step)) :][: b.step]
        first = next((i for i in later if (i - b.start) % b.step == 0), None)
    if first is None:
        return range(0)
    step = a.step * b.step // gcd(a.step, b.step)
    return range(first, max(min(a[-1], b[-1]) + 1, first), step)


def subtract(product: Masks, other: Masks) -> list[Masks]:
    """Elements of `product` that are not in `other`, as disjoint products."""
    common = tuple(a & b for a, b in zip(product, other, strict=True))
    if not all(common):
        return [product]
    pieces = []
    for d, (a, b) in enumerate(zip(product, other, strict=True)):
        if rest := a & ~b:
            pieces.append((*common[:d], rest, *product[d + 1 :]))
    return pieces


class Coverage:
    """Which elements of a tensor have arrived, and under which name.

    What has arrived is one set, whatever its names: 64,000 arrivals of as many names merge into a few products. Names
    are kept beside it, one a box, and are looked at when elements arrive twice.

    Args:
        shape: the tensor's shape. A tensor without elements is complete from the start.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.count = 0
        self._products: list[Masks] = []
        self._log: list[tuple[Box, str]] = []

    @property
    def total(self) -> int:
        """Number of elements of the tensor."""
        return prod(self.shape)

    @property
    def complete(self) -> bool:
        """Whether every element has arrived."""
        return self.count == self.total

    @property
    def names(self) -> list[str]:
        """Names under which elements arrived, in order of first arrival."""
        return list(dict.fromkeys(name for _, name in self._log))

    def find(self, box: Box) -> str | None:
        """Name under which some element of `box` has arrived, or None if none has."""
        wanted = masks(box)
        if not any(all(a & b for a, b in zip(product, wanted, strict=True)) for product in self._products):
            return None
        return next((name for other, name in self._log if all(map(intersect, other, box))), "")

    def claim(self, box: Box, product: Masks, count: int, name: str) -> str | None:
        """Add a box's elements if none of them is there: what replayed arrivals do, which seldom meet others.

        Args:
            box: the elements, at least one.
            product: `masks(box)`, and `count`, `size(box)`: whoever repeats an arrival has them.
            name: how they arrived.

        Returns:
            None, or the name under which some of them had arrived; then nothing has been added.
        """
        if self._products:
            for other in self._products:
                if all(a & b for a, b in zip(other, product, strict=True)):
                    return self.find(box)
            self._insert(product)
        else:
            self._products.append(product)
        self.count += count
        self._log.append((box, name))
        return None

    def add(self, box: Box, name: str = "") -> list[Masks]:
        """Add a box's elements; those that are there already stay under their first name.

        Args:
            box: the elements.
            name: how they arrived; "" is not kept.

        Returns:
            The new elements, as disjoint products.
        """
        if not size(box):
            return []
        fresh = [masks(box)]
        for product in self._products:
            fresh = [piece for old in fresh for piece in subtract(old, product)]
        for piece in fresh:
            self.count += _count(piece)
            self._insert(piece)
        if fresh and name:
            self._log.append((box, name))
        return fresh

    def remove(self, box: Box) -> None:
        """Take a box's elements out again."""
        gone = masks(box)
        self._products = [piece for product in self._products for piece in subtract(product, gone)]
        self.count = sum(map(_count, self._products))
        self._log = [(other, name) for other, name in self._log if subtract(masks(other), gone)]

    def boxes(self) -> list[Box]:
        """The elements that have arrived, as disjoint boxes."""
        return [box for product in self._products for box in boxes(product)]

    def missing(self, limit: int = 4) -> list[Box]:
        """Some boxes that have not arrived: the first `limit` of a disjoint cut of them."""
        left = [masks(whole(self.shape))] if self.total else []
        for product in self._products:
            left = [piece for old in left for piece in subtract(old, product)]
        found: list[Box] = []
        for piece in left:
            for box in boxes(piece):
                found.append(box)
                if len(found) == limit:
                    return found
        return found

    def complete_rows(self, columns: int) -> int:
        """Rows of a matrix (two dimensions) in which every column of the bit set `columns` has arrived."""
        every_row = (1 << self.shape[0]) - 1
        atoms = [(every_row, 0)]  # disjoint sets of rows, each with the columns that its rows have
        for rows, have in self._products:
            have &= columns
            if not have:
                continue
            split = []
            for atom, seen in atoms:
                if both := atom & rows:
                    split.append((both, seen | have))
                if rest := atom & ~rows:
                    split.append((rest, seen))
            atoms = split
        return reduce(lambda bits, atom: bits | atom[0] if atom[1] == columns else bits, atoms, 0)

    def take_rows(self, rows: range) -> "Coverage":
        """The coverage of some neighbouring rows of a matrix, counted from the first of them."""
        taken = Coverage((len(rows), *self.shape[1:]))
        keep = (1 << len(rows)) - 1
        for have, *rest in self._products:
            if have := (have >> rows.start) & keep:
                taken._products.append((have, *rest))
                taken.count += _count((have, *rest))
        return taken

    def _insert(self, piece: Masks) -> None:
        """Add a product, merged with those that differ from it in one dimension only."""
        merged = True
        while merged:
            merged = False
            for i, product in enumerate(self._products):
                differ = [d for d, (a, b) in enumerate(zip(product, piece, strict=True)) if a != b]
                if len(differ) == 1:
                    d = differ[0]
                    piece = (*piece[:d], piece[d] | product[d], *piece[d + 1 :])
                    del self._products[i]
                    merged = True
                    break
        self._products.append(piece)


def _count(product: Masks) -> int:
    return prod(bits.bit_count() for bits in product)
