"""What a safetensors file says about itself: its tensors, where their bytes lie, and which file it was.

A file is checked when its header is read: safetensors itself checks every offset against the others and against the
file's size.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from olq.errors import SourceError

#: Suffixes of checkpoint formats that are not read.
OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Args:
        name: its name.
        dtype: as the header spells it.
        shape: as the header says it.
        start: first byte, from the beginning of the file.
        stop: behind its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A file that is whole.

    Args:
        file: its path.
        entries: its tensors, in file order.
        identity: tells this file from one that takes its place later; see `identity_of`.
    """

    file: Path
    entries: tuple[Entry, ...]
    identity: tuple[int, ...]


def identity_of(facts: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written to: device, inode, size, time of the last write."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def read_header(file: Path) -> Header:
    """Check a file and read its header.

    Raises:
        SourceError: it is missing, truncated, corrupt, or of another format, or a shape is beyond torch's integers.
    """
    try:
        with file.open("rb") as raw:
            identity = identity_of(os.fstat(raw.fileno()))
            with safe_open(
                file, framework="pt"
            ):  # checks every offset against the others and the file's size
                pass
            length = int.from_bytes(raw.read(8), "little")
            described = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise corrupt(file, error) from error
    entries = [
        Entry(
            name,
            facts["dtype"],
            tuple(facts["shape"]),
            *(8 + length + offset for offset in facts["data_offsets"]),
        )
        for name, facts in described.items()
        if name != "__metadata__"
    ]
    for entry in entries:  # beside a zero, safetensors lets any number pass
        if math.prod(size for size in entry.shape if size) >= 1 << 63:
            beyond = ValueError(f"{entry.name!r} has sizes beyond any tensor: {list(entry.shape)}")
            raise corrupt(file, beyond)
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    return Header(file, tuple(entries), identity)


def corrupt(file: Path, error: Exception) -> SourceError:
    """The error of a file that can't be read."""
    other = file.suffix in OTHER_FORMATS
    return SourceError(
        "A file of the checkpoint can't be read: it is truncated, corrupt, or not in the safetensors format.",
        where=str(file),
        found=f"{error} ({file.stat().st_size if file.exists() else 0} bytes)",
        need="a whole safetensors file",
        remedy="convert it to safetensors" if other else "fetch this file again",
    )
