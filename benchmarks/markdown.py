"""What the generated pages are made of: rows of a file, literal text, tables."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DASH = "–"
Row = Mapping[str, object]


def rows_of(file: Path) -> list[Row]:
    """The rows of a file, in its order.

    Raises:
        ValueError: a line that is no JSON object.
    """
    found: list[Row] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as fault:
            raise ValueError(
                f"{file}:{number}: not JSON ({fault}): take the line out, or repair it"
            ) from fault
        if not isinstance(row, dict):
            raise ValueError(
                f"{file}:{number}: found {type(row).__name__}, but a row is a JSON object: repair it"
            )
        found.append(row)
    return found


def moment(row: Row) -> str:
    """When a row was made, comparable; rows without a time are older than all others."""
    return str(row.get("time") or "")


def prose(paragraph: str) -> list[str]:
    """Wrapped lines and an empty one."""
    return [*textwrap.wrap(paragraph, 119, break_long_words=False, break_on_hyphens=False), ""]


def text(value: object) -> str:
    """A value on one line, as Markdown that shows it literally, also within a cell."""
    line = " ".join(str(value).split())
    return "".join(f"\\{c}" if c in "\\|<>&*_[]`$~{#" else c for c in line)


def versions(row: Row) -> str:
    """What a row says about software."""
    names = {"driver": "driver", "torch": "torch", "triton": "Triton", "python": "Python"}
    return text(", ".join(f"{name} {row[key]}" for key, name in names.items() if row.get(key))) or DASH


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table and an empty line."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *lines)] + [""]
