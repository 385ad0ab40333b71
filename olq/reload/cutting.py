"""Where what arrives has to go: whole scale units straight into the kernel tensors, the rest into a stage.

A box of a weight is cut first by the parts of a fused layer, then in each part into the largest inner rectangle of
whole units and up to four rectangles around it. The cut depends on the plan and the box only, never on the source.
"""

from dataclasses import dataclass
from typing import Any

from olq.methods.base import Target, WeightPlan
from olq.reload.region import Box, intersect, size, slices


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of one part.

    Args:
        target: the part, and where in it.
        lead: indices of the leading dimensions.
        elements: how many.
        whole_units: it may be quantized as it is; otherwise it has to wait for the rest of its units.
        index: where its values lie in the source; None is all of it.
    """

    target: Target
    lead: Box
    elements: int
    whole_units: bool
    index: tuple[Any, ...] | None


def cut(plan: WeightPlan, box: Box) -> list[Piece]:
    """Cut a box of the load-format parameter; whole units come before what has to wait."""
    pieces: list[Piece] = []
    if not size(box):
        return pieces
    for part, (start, count) in enumerate(zip(plan.geometry.starts, plan.geometry.parts, strict=True)):
        rows = intersect(box[-2], range(start, start + count))
        if rows:
            first = (rows.start - box[-2].start) // box[-2].step
            inside = normal(range(rows.start - start, rows.stop - start, rows.step))
            pieces += _cut_part(plan, box, part, inside, first)
    return pieces


def _cut_part(plan: WeightPlan, box: Box, part: int, rows: range, first: int) -> list[Piece]:
    """Cut the rows of one part; `first` is the first of them in the source."""
    lead, columns = box[:-2], normal(box[-1])
    unit_rows, unit_columns = plan.unit_of(part)
    inner_rows = _inner(rows, unit_rows, plan.geometry.parts[part])
    inner_columns = _inner(columns, unit_columns, plan.geometry.columns)

    def piece(down: slice, across: slice, whole_units: bool) -> Piece:
        at = slice(down.start + first, down.stop + first), across
        everything = at == (slice(0, len(box[-2])), slice(0, len(columns)))
        target = Target(slices(lead), part, rows[down], columns[across])
        count = size((*lead, target.rows, target.columns))
        return Piece(target, lead, count, whole_units, None if everything else (..., *at))

    height, width = len(rows), len(columns)
    if not inner_rows or not inner_columns:
        return [piece(slice(0, height), slice(0, width), whole_units=False)]
    top, left = rows.index(inner_rows[0]), columns.index(inner_columns[0])
    bottom, right = top + len(inner_rows), left + len(inner_columns)
    pieces = [piece(slice(top, bottom), slice(left, right), whole_units=True)]
    if top:
        pieces.append(piece(slice(0, top), slice(0, width), whole_units=False))
    if bottom < height:
        pieces.append(piece(slice(bottom, height), slice(0, width), whole_units=False))
    if left:
        pieces.append(piece(slice(top, bottom), slice(0, left), whole_units=False))
    if right < width:
        pieces.append(piece(slice(top, bottom), slice(right, width), whole_units=False))
    return pieces


def normal(indices: range) -> range:
    """The same indices with an exact stop, and step 1 where there is one index at most."""
    if len(indices) <= 1:
        return range(indices.start, indices.start + len(indices))
    return range(indices.start, indices[-1] + 1, indices.step)


def _inner(indices: range, unit: int, extent: int) -> range:
    """Indices that make up whole units."""
    if unit == 1:
        return indices
    if indices.step != 1:
        return range(0)
    first = -(-indices.start // unit) * unit
    last = indices.stop if indices.stop == extent else indices.stop // unit * unit
    return range(first, max(last, first))
