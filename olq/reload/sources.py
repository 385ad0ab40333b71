"""Where weights come from: a folder of safetensors, a file, a mapping, or any iterator of (name, tensor).

A folder or a file is checked before the first tensor is handed out: every shard that the index names exists, every
header is whole, every name is where the index says and stands once. Tensors are handed out one at a time, in file
order: as views of the mapped file; or, with a carrier, in the memory of a device, to which `olq.reload.staging` reads
ahead within bounds. olq never pulls ahead of an iterator that it is given, and keeps no tensor.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from olq.errors import SourceError
from olq.reload.carriers import Carrier
from olq.reload.headers import OTHER_FORMATS, Header, corrupt, read_header
from olq.reload.options import DEFAULT_STAGING, Staging
from olq.reload.staging import Staged
from olq.reload.staging_plan import DTYPES

INDEX_NAME = "model.safetensors.index.json"

#: What `olq.load` takes.
Weights = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Source:
    """Weights that are ready to be read.

    Args:
        items: (name, tensor), lazily.
        names: all names in order, if they are known beforehand.
        total_bytes: bytes of all tensors, if known.
        where: the source in words.
        staged: the reading ahead of files that go to a device; None is a source that is not read ahead.
    """

    items: Iterator[tuple[str, Tensor]]
    names: tuple[str, ...] | None
    total_bytes: int | None
    where: str
    staged: Staged | None = None

    def close(self) -> None:
        """End what reads ahead: threads have ended and their buffers are free when it returns."""
        if self.staged is not None:
            self.staged.stop()


def open_source(
    weights: Weights,
    carrier: Callable[[], Carrier | None] | None = None,
    staging: Staging | None = DEFAULT_STAGING,
) -> Source:
    """Check what can be checked before the first tensor.

    Args:
        weights: a folder of safetensors files (an index is honoured), one such file, a mapping, or an iterable of
            (name, tensor).
        carrier: asked, for files, what takes their tensors to a device while they are read; if nothing does, they are
            views of the mapped file, as they are if a dtype is not in `olq.reload.staging_plan.DTYPES`.
        staging: how files are read for a carrier; None maps them.

    Raises:
        SourceError: a file is missing, truncated or corrupt, a name stands twice, or there is nothing at all.
    """
    if isinstance(weights, (str, os.PathLike)):
        takes = carrier() if carrier is not None and staging is not None else None
        return _open_files(Path(weights), takes, staging or DEFAULT_STAGING)
    if isinstance(weights, Mapping):
        if not weights:
            raise _empty("a mapping", "an empty mapping")
        total = None
        if isinstance(weights, dict):  # any other mapping may read a tensor each time it is asked for one
            for position, item in enumerate(weights.items(), start=1):
                _check_item(item, position, "a mapping")
            total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        names = tuple(map(str, weights))
        return Source(_pairs(weights.items(), "a mapping"), names, total, "a mapping")
    if not isinstance(weights, Iterable):
        raise SourceError(
            "This can't be a source of weights.",
            where="the weights to load",
            found=type(weights).__name__,
            need="a folder of safetensors files, such a file, a mapping, or an iterable of (name, tensor)",
            remedy="pass a path, a state_dict, or an iterator such as state_dict.items()",
        )
    return Source(_pairs(weights, "an iterator"), None, None, "an iterator")


def _pairs(weights: Iterable[Any], where: str) -> Iterator[tuple[str, Tensor]]:
    count = 0
    for item in weights:
        count += 1
        _check_item(item, count, where)
        name, tensor = item
        del item  # the consumer may be the last to hold the tensor
        yield name, tensor
        del tensor
    if not count:
        raise _empty(where, "no items")


def _check_item(item: Any, position: int, where: str) -> None:
    if (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], Tensor)
    ):
        return
    raise SourceError(
        "Weights have to be pairs of a name and a tensor.",
        where=f"item {position} of {where}",
        found=_kind(item),
        need="a tuple of a str and a torch.Tensor",
        remedy="pass a mapping, a folder, or an iterator of pairs such as state_dict().items()",
    )


def _kind(item: Any) -> str:
    if isinstance(item, tuple):
        parts = [repr(part)[:60] if isinstance(part, str) else type(part).__name__ for part in item[:3]]
        return "(" + ", ".join(parts) + (", ...)" if len(item) > 3 else ")")
    return type(item).__name__


def _open_files(path: Path, carrier: Carrier | None, staging: Staging) -> Source:
    expected: dict[Path, set[str]] | None = None
    if path.is_dir():
        index = path / INDEX_NAME
        if index.exists():
            expected = _indexed(index)
        files = list(expected) if expected is not None else _listed(path)
    elif path.is_file():
        files = [path]
    else:
        raise SourceError(
            "There is no such checkpoint.",
            where=str(path),
            found="nothing at this path",
            need="a folder of safetensors files, or one such file",
            remedy="check the path",
        )
    headers = [read_header(file) for file in files]
    owner: dict[str, Path] = {}
    for header in headers:
        for entry in header.entries:
            if entry.name in owner:
                raise SourceError(
                    "A tensor stands in two files of one checkpoint.",
                    where=str(path),
                    found=f"{entry.name!r} in {owner[entry.name].name} and in {header.file.name}",
                    need="each name once",
                    remedy=f"write {INDEX_NAME}, or remove the file that is left over",
                )
            owner[entry.name] = header.file
    if not owner:
        raise _empty(str(path), "files without a tensor")
    if expected is not None:
        _check_index(path, expected, owner)
    entries = [entry for header in headers for entry in header.entries]
    total = sum(entry.nbytes for entry in entries)
    if carrier is not None and all(entry.dtype in DTYPES for entry in entries):
        staged = Staged(headers, carrier, staging)
        return Source(staged.items(), tuple(owner), total, str(path), staged)
    return Source(_read(headers), tuple(owner), total, str(path))


def _listed(folder: Path) -> list[Path]:
    files = [f for f in folder.glob("*.safetensors") if f.is_file() and not f.name.startswith(".")]
    if not files:
        others = sorted(f.name for f in folder.iterdir() if f.suffix in OTHER_FORMATS)
        there = f", only {', '.join(others[:3])}: other formats are not read" if others else ""
        raise _empty(str(folder), f"no *.safetensors and no {INDEX_NAME}{there}")
    return sorted(files, key=_natural)


def _indexed(index: Path) -> dict[Path, set[str]]:
    """Names by file, as the index says."""
    files: dict[Path, set[str]] = {}
    same: dict[str, Path] = {}  # a file may be spelled in several ways: the first one counts
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for file in sorted(set(weight_map.values()), key=lambda file: (_natural(Path(file)), file)):
            path = index.parent / file
            path = same.setdefault(os.path.realpath(path), path)
            files.setdefault(path, set()).update(name for name, where in weight_map.items() if where == file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            "The index of a checkpoint can't be read.",
            where=str(index),
            found=f"{type(error).__name__}: {error}",
            need='a JSON object with "weight_map": {name: file}',
            remedy="fetch the index again, or remove it if the folder is complete without it",
        ) from error
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise SourceError(
            "Files of a checkpoint are missing.",
            where=str(index.parent),
            found=f"{len(absent)} of {len(files)} files missing: {', '.join(absent[:5])}",
            need="every file that the index names",
            remedy="fetch the missing files",
        )
    return files


def _check_index(folder: Path, expected: Mapping[Path, set[str]], owner: Mapping[str, Path]) -> None:
    wrong = [name for file, names in expected.items() for name in names if owner.get(name) != file]
    indexed = set().union(*expected.values())
    extra = [name for name in owner if name not in indexed]
    if wrong or extra:
        raise SourceError(
            "The index and the files of a checkpoint do not agree.",
            where=str(folder / INDEX_NAME),
            found=f"{len(wrong)} names not where the index says {sorted(wrong)[:3]}, "
            f"{len(extra)} not in the index {extra[:3]}",
            need="files and index of one checkpoint",
            remedy="fetch the checkpoint again, or remove files that are left over from another",
        )


def _read(headers: Iterable[Header]) -> Iterator[tuple[str, Tensor]]:
    for header in headers:
        try:
            with safe_open(header.file, framework="pt") as reader:
                for entry in header.entries:
                    yield entry.name, reader.get_tensor(entry.name)
        except (SafetensorError, OSError) as error:
            raise corrupt(header.file, error) from error


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key under which shard 10 comes after shard 2."""
    parts = re.split(r"(\d+)", path.name)  # digits stand at odd places
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


def _empty(where: str, found: str) -> SourceError:
    return SourceError(
        "There are no weights to load.",
        where=where,
        found=found,
        need="at least one tensor",
        remedy="check the path, or what the iterator yields",
    )
