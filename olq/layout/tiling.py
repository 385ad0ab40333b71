"""Proof that named spans of rows cover a range exactly once."""

from collections.abc import Mapping

from olq.errors import LayoutError


def check_tiling(rows: int, spans: Mapping[str, tuple[int, int]], *, where: str) -> None:
    """Raise unless the spans (start, stop) tile rows 0..rows: no gap, no overlap, nothing outside.

    Args:
        rows: how many rows there are.
        spans: rows of each part, in any order; empty spans are allowed anywhere inside.
        where: the tensor, for the message.

    Raises:
        LayoutError: names the first row that no part owns, or that two parts own.
    """
    ordered = sorted(spans.items(), key=lambda item: item[1])
    text = ", ".join(f"{name} {start}..{stop}" for name, (start, stop) in ordered) or "no parts"
    reached, before = 0, "the start"
    for name, (start, stop) in ordered:
        if not 0 <= start <= stop <= rows:
            raise _error(
                "A part lies outside the output.", f"{name!r} has rows {start}..{stop}", rows, text, where
            )
        if start == stop:
            continue
        if start > reached:
            found = f"rows {reached}..{start}, between {before} and {name!r}, belong to no part"
            raise _error("Parts of an output leave a gap.", found, rows, text, where)
        if start < reached:
            found = f"rows {start}..{min(reached, stop)} belong to {before} and to {name!r}"
            raise _error("Parts of an output overlap.", found, rows, text, where)
        reached, before = stop, repr(name)
    if reached < rows:
        found = f"rows {reached}..{rows}, after {before}, belong to no part"
        raise _error("Parts of an output leave a gap.", found, rows, text, where)


def _error(problem: str, found: str, rows: int, text: str, where: str) -> LayoutError:
    return LayoutError(
        problem,
        where=where,
        found=f"{found} ({text})",
        need=f"parts that tile rows 0..{rows} exactly",
        remedy="pass the row where each part starts and stops; name rows that nobody computes as padding",
    )
