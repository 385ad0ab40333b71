"""The page of failures names a test for each kind, and each of them exists. Nothing is collected or run."""

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "failures.md"
ROW = re.compile(r"^\|(?P<kind>[^|]*)\|(?P<test>[^|]*)\|$")


def rows(page: str) -> list[tuple[str, str]]:
    """Kind and test of each row of the page's tables, heads and rules left out."""
    found = [
        (m["kind"].strip(), m["test"].strip()) for line in page.splitlines() if (m := ROW.match(line.strip()))
    ]
    return [row for row in found if row not in (("kind", "test"), ("---", "---"))]


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of a module, those in classes included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f.name for f in functions if f.name.startswith("test_")}


def fault(kind: str, test: str) -> str | None:
    """What is wrong with a row, or None."""
    node = re.fullmatch(r"`(?P<path>tests/[\w/]+\.py)::(?P<name>test_\w+)`", test)
    if not kind:
        return f"no kind for {test}"
    if node is None:
        return f"{kind!r} names no test, but {test!r}"
    if not (REPO / node["path"]).is_file():
        return f"{kind!r}: there is no file {node['path']}"
    if node["name"] not in functions_of(REPO / node["path"]):
        return f"{kind!r}: {node['path']} has no {node['name']}"
    return None


def test_each_kind_has_a_test_that_exists():
    table = rows(PAGE.read_text(encoding="utf-8"))
    assert len(table) > 80  # or the table is no longer found
    assert not [text for row in table if (text := fault(*row))]


def test_each_kind_stands_once():
    kinds = [kind for kind, _ in rows(PAGE.read_text(encoding="utf-8"))]
    assert sorted(kinds) == sorted(set(kinds))


def test_every_line_of_a_table_is_a_row():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    heads = [line for line in lines if line == "| kind | test |" or line == "|---|---|"]
    assert len(lines) == len(heads) + len(rows(PAGE.read_text(encoding="utf-8")))


HERE = "tests/test_failures_page.py"


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("| a kind | |", "names no test"),
        ("| a kind | by hand |", "names no test"),
        ("| a kind | `tests/reload` |", "names no test"),
        (f"| | `{HERE}::test_each_kind_stands_once` |", "no kind"),
        ("| a kind | `tests/test_nowhere.py::test_x` |", "there is no file"),
        (f"| a kind | `{HERE}::test_x` |", "has no test_x"),
        (f"| a kind | `{HERE}::rows` |", "names no test"),
        (f"| a kind | `{HERE}::test_each_kind_stands_once` |", None),
    ],
)
def test_a_planted_fault_is_found(row: str, found: str | None):
    (only,) = rows(f"| kind | test |\n|---|---|\n{row}\n")
    text = fault(*only)
    assert text is None if found is None else found in (text or "")
