"""Where weights come from: a folder of safetensors, a file, a mapping, or any iterator of (name, tensor).

A folder or a file is checked before the first tensor is handed out: every shard that the index names exists, every
header is whole, every name is where the index says and stands once. Tensors are handed out one at a time, in file
order, as views of the mapped file; olq never pulls ahead and keeps none.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from olq.errors import SourceError

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
    """

    items: Iterator[tuple[str, Tensor]]
    names: tuple[str, ...] | None
    total_bytes: int | None
    where: str


def open_source(weights: Weights) -> Source:
    """Check what can be checked before the first tensor.

    Args:
        weights: a folder of safetensors files (an index is honoured), one such file, a mapping, or an iterable of
            (name, tensor).

    Raises:
        SourceError: a file is missing, truncated or corrupt, a name stands twice, or there is nothing at all.
    """
    if isinstance(weights, (str, os.PathLike)):
        return _open_files(Path(weights))
    if isinstance(weights, Mapping):
        if not weights:
            raise _empty("a mapping", "an empty mapping")
        named = cast("Mapping[str, Tensor]", weights)
        total = sum(t.numel() * t.element_size() for t in named.values())
        return Source(iter(named.items()), tuple(named), total, "a mapping")
    return Source(_pairs(weights), None, None, "an iterator")


def _pairs(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    count = 0
    for item in weights:
        count += 1
        if not (
            isinstance(item, tuple)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], Tensor)
        ):
            raise SourceError(
                "An iterator of weights has to yield (name, tensor).",
                where=f"item {count} of the iterator",
                found=_kind(item),
                need="a tuple of a str and a torch.Tensor",
                remedy="pass a mapping, a folder, or an iterator of pairs such as state_dict().items()",
            )
        name, tensor = item
        del item
        yield name, tensor
        del tensor
    if not count:
        raise _empty("an iterator", "no items")


def _kind(item: Any) -> str:
    if isinstance(item, tuple):
        return "(" + ", ".join(type(part).__name__ for part in item) + ")"
    return type(item).__name__


def _open_files(path: Path) -> Source:
    if path.is_dir():
        index = path / INDEX_NAME
        files, expected = (_indexed(index)) if index.exists() else (_listed(path), None)
    elif path.is_file():
        files, expected = [path], None
    else:
        raise SourceError(
            "There is no such checkpoint.",
            where=str(path),
            found="nothing at this path",
            need="a folder of safetensors files, or one such file",
            remedy="check the path",
        )
    owner: dict[str, Path] = {}
    total = 0
    for file in files:
        for name, count in _header(file):
            if name in owner:
                raise SourceError(
                    "A tensor stands in two files of one checkpoint.",
                    where=str(path),
                    found=f"{name!r} in {owner[name].name} and in {file.name}",
                    need="each name once",
                    remedy=f"write {INDEX_NAME}, or remove the file that is left over",
                )
            owner[name] = file
            total += count
    if not owner:
        raise _empty(str(path), "files without a tensor")
    if expected is not None:
        _check_index(path, expected, owner)
    return Source(_read(files), tuple(owner), total, str(path))


def _listed(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"), key=_natural)
    if not files:
        raise _empty(str(folder), f"no *.safetensors and no {INDEX_NAME}")
    return files


def _indexed(index: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()), key=lambda name: _natural(Path(name)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            "The index of a checkpoint can't be read.",
            where=str(index),
            found=f"{type(error).__name__}: {error}",
            need='a JSON object with "weight_map": {name: file}',
            remedy="fetch the index again, or remove it if the folder is complete without it",
        ) from error
    files = [index.parent / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise SourceError(
            "Files of a checkpoint are missing.",
            where=str(index.parent),
            found=f"{len(absent)} of {len(files)} files missing: {', '.join(absent[:5])}",
            need="every file that the index names",
            remedy="fetch the missing files",
        )
    return files, weight_map


def _check_index(folder: Path, expected: Mapping[str, str], owner: Mapping[str, Path]) -> None:
    wrong = [
        name for name, file in expected.items() if name not in owner or owner[name].name != Path(file).name
    ]
    extra = [name for name in owner if name not in expected]
    if wrong or extra:
        raise SourceError(
            "The index and the files of a checkpoint do not agree.",
            where=str(folder / INDEX_NAME),
            found=f"{len(wrong)} names not where the index says {wrong[:3]}, {len(extra)} not in the index {extra[:3]}",
            need="files and index of one checkpoint",
            remedy="fetch the checkpoint again, or remove files that are left over from another",
        )


def _header(file: Path) -> list[tuple[str, int]]:
    """(name, bytes) of each tensor, in file order."""
    try:
        with safe_open(file, framework="pt") as reader:
            return [(name, _nbytes(reader.get_slice(name))) for name in reader.offset_keys()]
    except (SafetensorError, OSError) as error:
        raise SourceError(
            "A file of the checkpoint is truncated or corrupt.",
            where=str(file),
            found=f"{error} ({file.stat().st_size if file.exists() else 0} bytes)",
            need="a whole safetensors file",
            remedy="fetch this file again",
        ) from error


#: Bits of each dtype of the safetensors format.
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip


def _nbytes(piece: Any) -> int:
    count = 1
    for n in piece.get_shape():
        count *= n
    return count * _BITS.get(piece.get_dtype(), 8) // 8


def _read(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.offset_keys():
                yield name, reader.get_tensor(name)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key under which shard 10 comes after shard 2."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def _empty(where: str, found: str) -> SourceError:
    return SourceError(
        "There are no weights to load.",
        where=where,
        found=found,
        need="at least one tensor",
        remedy="check the path, or what the iterator yields",
    )
