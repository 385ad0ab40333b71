"""What an audit says: which bytes of which tensor, whose they are, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from olq.alloc.places import Coordinate, boxes_text, places_of, size_text
from olq.alloc.spec import TensorSpec
from olq.errors import CoverageError

Kind = Literal["unwritten", "derived", "padding"]

# What the bytes of each kind did; and, for a report of this kind alone, its first line and its way out.
_WORDS: dict[Kind, tuple[str, str, str]] = {
    "unwritten": (
        "were written by nobody",
        "Kernel-owned memory has bytes that nobody wrote.",
        "let the producer write these bytes, or give the spec the order that owns them as padding",
    ),
    "derived": (
        "depend on memory that nobody wrote",
        "Something read kernel-owned memory before anybody wrote it.",
        "let a producer write these bytes first, or mask the read",
    ),
    "padding": (
        "of padding were written over",
        "Padding of kernel-owned memory was written over.",
        "let the producer write logical elements only, masked at the edges",
    ),
}


@dataclass(frozen=True)
class Finding:
    """Bytes of one tensor that are not as they should be.

    Args:
        owner: who had to write them, as told to `allocate`.
        tensor: dtype, shape and layout, in words.
        count: how many bytes.
        nbytes: bytes of the whole storage.
        coordinates: logical coordinates of the first few thousand; a padding cell's lie outside the matrix.
        gaps: how many of the bytes lie between elements, where strides reach nothing.
        kind: "unwritten": nobody wrote them. "derived": their value depends on bytes that nobody wrote. "padding":
            the allocator wrote them, and somebody wrote something else there.
    """

    owner: str
    tensor: str
    count: int
    nbytes: int
    coordinates: tuple[Coordinate, ...]
    gaps: int = 0
    kind: Kind = "unwritten"

    @classmethod
    def of(
        cls, owner: str, spec: TensorSpec, positions: Sequence[int], kind: Kind = "unwritten"
    ) -> "Finding":
        """A finding about some byte positions, ascending, of a storage."""
        coordinates, gaps = places_of(spec, positions)
        return cls(owner, size_text(spec), len(positions), spec.nbytes, tuple(coordinates), gaps, kind)

    def __str__(self) -> str:
        at = [f"at {boxes_text(self.coordinates)}"] if self.coordinates else []
        at += [f"{self.gaps} of them between elements"] if self.gaps else []
        did = _WORDS[self.kind][0]
        return f"{self.owner}, {self.tensor}: {self.count} of {self.nbytes} bytes {did}, {', '.join(at)}"


def raise_findings(findings: Sequence[Finding], most: int = 8) -> None:
    """Raise for findings, if there are any.

    Raises:
        CoverageError: names the first few tensors, with coordinates and owners.
    """
    if not findings:
        return
    lines = [str(finding) for finding in findings[:most]]
    lines += [f"and {len(findings) - most} more tensors"] if len(findings) > most else []
    # Unwritten bytes explain the others, so they give the first line.
    kinds = {finding.kind for finding in findings}
    _, problem, remedy = next(words for kind, words in _WORDS.items() if kind in kinds)
    raise CoverageError(
        problem,
        where=", ".join(dict.fromkeys(finding.owner for finding in findings[:most])),
        found="\n          ".join(lines),
        need="each byte written: data by its producer, padding by whoever knows the layout",
        remedy=remedy,
    )
