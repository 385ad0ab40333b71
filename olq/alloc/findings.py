"""What an audit says: which bytes of which tensor, whose they are, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from olq.alloc.places import Coordinate, boxes_text, places_of, size_text
from olq.alloc.spec import TensorSpec
from olq.errors import CoverageError


@dataclass(frozen=True)
class Finding:
    """Bytes of one tensor that nobody wrote, or that were computed from such bytes.

    Args:
        owner: who had to write them, as told to `allocate`.
        tensor: dtype, shape and layout, in words.
        count: how many bytes.
        nbytes: bytes of the whole storage.
        coordinates: logical coordinates of the first few thousand; a padding cell's lie outside the matrix.
        gaps: how many of the bytes lie between elements, where strides reach nothing.
        derived: False for bytes that nobody wrote, True for bytes whose value depends on such bytes.
    """

    owner: str
    tensor: str
    count: int
    nbytes: int
    coordinates: tuple[Coordinate, ...]
    gaps: int = 0
    derived: bool = False

    @classmethod
    def of(
        cls, owner: str, spec: TensorSpec, positions: Sequence[int], *, derived: bool = False
    ) -> "Finding":
        """A finding about some byte positions, ascending, of a storage."""
        coordinates, gaps = places_of(spec, positions)
        return cls(
            owner, size_text(spec), len(positions), spec.nbytes, tuple(coordinates), gaps, derived=derived
        )

    def __str__(self) -> str:
        what = "depend on memory that nobody wrote" if self.derived else "were written by nobody"
        at = [f"at {boxes_text(self.coordinates)}"] if self.coordinates else []
        at += [f"{self.gaps} of them between elements"] if self.gaps else []
        return f"{self.owner}, {self.tensor}: {self.count} of {self.nbytes} bytes {what}, {', '.join(at)}"


def raise_findings(findings: Sequence[Finding], most: int = 8) -> None:
    """Raise for findings, if there are any.

    Raises:
        CoverageError: names the first few tensors, with coordinates and owners.
    """
    if not findings:
        return
    lines = [str(finding) for finding in findings[:most]]
    lines += [f"and {len(findings) - most} more tensors"] if len(findings) > most else []
    derived = all(finding.derived for finding in findings)
    raise CoverageError(
        "Something read kernel-owned memory before anybody wrote it."
        if derived
        else "Kernel-owned memory has bytes that nobody wrote.",
        where=", ".join(dict.fromkeys(finding.owner for finding in findings[:most])),
        found="\n          ".join(lines),
        need="each byte written: data by its producer, padding by whoever knows the layout",
        remedy="let a producer write these bytes first, or mask the read"
        if derived
        else "let the producer write these bytes, or give the spec the order that owns them as padding",
    )
