"""The text: what every Python installation has, with some files held out.

Promises:
    The same installation gives the same text, in the same order.
    No training text has a held-out file, its test, or any file that repeats eight of its lines in a row.
Text:
    library        the standard library's Python files, without its tests
    tests          the standard library's test suite, where it is installed
    headers        Python's own C headers
    torch_python   PyTorch's Python files
    torch_headers  C++ headers that come with PyTorch (c10, ATen/core, torch/csrc)
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch

HELD_OUT_A = ("bisect", "colorsys", "graphlib", "queue", "sched", "shelve", "textwrap")
HELD_OUT_B = ("abstract.h", "ceval.h", "codecs.h", "longobject.h", "pyerrors.h", "pymem.h")

# Tables of characters and generated grammars: megabytes that teach only how to write tables.
LEFT_OUT_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "data",
    "generated",
    "lib2to3",
}
LARGEST_FILE = 800_000
WINDOW = 8


@dataclass(frozen=True)
class Document:
    """One file: its path below its root with '/' and its text."""

    name: str
    text: str


@dataclass
class Corpus:
    """Training documents by group, the two held-out texts, and what was left out and why."""

    groups: dict[str, list[Document]]
    heldout_a: str
    heldout_b: str
    left_out: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, object]:
        """Counts and a hash of all training text, for the record beside a checkpoint."""
        digest = hashlib.sha256()
        for documents in self.groups.values():
            for document in documents:
                digest.update(document.text.encode())
        return {
            "files": {name: len(documents) for name, documents in self.groups.items()},
            "characters": {name: sum(len(d.text) for d in docs) for name, docs in self.groups.items()},
            "left_out_files": self.left_out,
            "sha256": digest.hexdigest(),
        }


def gather(
    library: Path | None = None, include: Path | None = None, torch_folder: Path | None = None
) -> Corpus:
    """Read the text of an installation; folders not given are those of the running Python and PyTorch.

    Raises:
        FileNotFoundError: a held-out file is missing; for headers, Python's development files are needed.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    include = include or Path(sysconfig.get_path("include"))
    torch_folder = torch_folder or Path(torch.__file__).parent

    left_out = {"not_utf8": 0, "too_large": 0, "repeats_held_out": 0, "duplicate": 0}
    held_a = [Document(f"{name}.py", (library / f"{name}.py").read_text("utf-8")) for name in HELD_OUT_A]
    held_b = [Document(name, (include / name).read_text("utf-8")) for name in HELD_OUT_B]
    forbidden = set().union(*(_windows(document.text) for document in held_a + held_b))

    names_a = {f"{name}.py" for name in HELD_OUT_A} | {f"test/test_{name}.py" for name in HELD_OUT_A}
    python = _read(library, "*.py", names_a, left_out)
    # A platform's build settings say where this Python was built: not text to learn.
    python = [document for document in python if not document.name.startswith(("_sysconfigdata", "config-"))]
    groups = {
        "library": [document for document in python if not _is_test(document.name)],
        "tests": [document for document in python if _is_test(document.name)],
        "headers": [d for d in _read(include, "*.h", set(HELD_OUT_B), left_out) if d.name != "pyconfig.h"],
        "torch_python": _read(torch_folder, "*.py", set(), left_out),
        "torch_headers": [
            Document(f"{folder}/{document.name}", document.text)
            for folder in ("c10", "ATen/core", "torch/csrc")
            for document in _read(torch_folder / "include" / folder, "*.h", set(), left_out)
        ],
    }
    seen: set[str] = set()
    for name, documents in groups.items():
        groups[name] = [d for d in documents if _is_new(d, seen, forbidden, left_out)]
    return Corpus(groups, "\n".join(d.text for d in held_a), "\n".join(d.text for d in held_b), left_out)


def _read(root: Path, pattern: str, held_out: set[str], left_out: dict[str, int]) -> list[Document]:
    documents = []
    for path in sorted(root.rglob(pattern), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if name in held_out or LEFT_OUT_FOLDERS.intersection(name.split("/")) or not path.is_file():
            continue
        raw = path.read_bytes()
        if len(raw) > LARGEST_FILE:
            left_out["too_large"] += 1
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:  # the test suite has files in other encodings on purpose
            left_out["not_utf8"] += 1
            continue
        if text.strip():
            documents.append(Document(name, text.replace("\r\n", "\n")))
    return documents


def _is_test(name: str) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in name.split("/"))


def _windows(text: str) -> set[tuple[str, ...]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {tuple(lines[i : i + WINDOW]) for i in range(len(lines) - WINDOW + 1)}


def _is_new(
    document: Document, seen: set[str], forbidden: set[tuple[str, ...]], left_out: dict[str, int]
) -> bool:
    if document.text in seen:
        left_out["duplicate"] += 1
        return False
    seen.add(document.text)
    if not forbidden.isdisjoint(_windows(document.text)):
        left_out["repeats_held_out"] += 1
        return False
    return True
