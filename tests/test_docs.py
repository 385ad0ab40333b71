"""The documentation runs, and what it points at exists.

Each page is one program: its Python blocks, in order, in a fresh interpreter that starts in a folder of its
own with `examples/` in it. A block that can't run here carries its reason on the line above its fence:

    <!-- not run: needs vLLM and a GPU -->
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs"
ROOT_PAGES = ["README.md", "CONTRIBUTING.md", "RELEASING.md", "CHANGELOG.md"]
LANGUAGES = {"python", "console", "text", "toml", "json", "yaml", "makefile", "mermaid"}
REASON = re.compile(r"<!-- not run: (?P<reason>.+) -->")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *(?P<info>[^`\n]*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is that of its first line of text, counted from 1."""

    language: str
    line: int
    text: str
    reason: str | None


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a Markdown page; a directive's fence, like {toctree}, is one block."""
    found, lines, i = [], page.splitlines(), 0
    while i < len(lines):
        start = FENCE.match(lines[i])
        if start:
            end = next(
                (j for j in range(i + 1, len(lines)) if lines[j].strip() == start["ticks"]), len(lines)
            )
            above = REASON.fullmatch(lines[i - 1].strip()) if i else None
            indent = len(start["indent"])
            text = "\n".join(line[indent:] for line in lines[i + 1 : end])
            found.append(Block(start["info"].strip(), i + 2, text, above["reason"] if above else None))
            i = end
        i += 1
    return found


def pages() -> list[Path]:
    written = [p for p in DOCS.rglob("*.md") if "_build" not in p.parts]
    return [p for name in ROOT_PAGES if (p := REPO / name).exists()] + sorted(written)


def name_of(page: Path) -> str:
    return str(page.relative_to(REPO))


def program_of(page: Path) -> str:
    """The page's blocks at their own lines, so that a traceback names the line of the page."""
    program = ""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language == "python" and block.reason is None:
            program += "\n" * (block.line - 1 - program.count("\n")) + block.text + "\n"
    return program


EACH_PAGE = pytest.mark.parametrize("page", pages(), ids=name_of)


@pytest.mark.parametrize("page", [p for p in pages() if program_of(p).strip()], ids=name_of)
def test_the_python_of_the_page_runs(page: Path, tmp_path: Path):
    program = tmp_path / "page.py"
    program.write_text(program_of(page), encoding="utf-8")
    for folder in ("examples", "benchmarks"):
        if (REPO / folder).exists():
            (tmp_path / folder).symlink_to(REPO / folder)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{name_of(page)}, same line numbers as page.py:\n{done.stdout}{done.stderr}"


@EACH_PAGE
def test_each_block_says_what_it_is(page: Path):
    """A block with another spelling of `python`, or with none, would never be run and nobody would notice."""
    unknown = [
        f"{name_of(page)}:{b.line - 1}: {b.language or 'no language'!r}; use one of {sorted(LANGUAGES)}"
        for b in blocks_of(page.read_text(encoding="utf-8"))
        if b.language not in LANGUAGES and not re.fullmatch(r"\{[\w-]+\}.*", b.language)
    ]
    assert not unknown, "\n".join(unknown)


@EACH_PAGE
def test_each_block_that_is_not_run_says_why(page: Path):
    text = page.read_text(encoding="utf-8")
    used = [b for b in blocks_of(text) if b.reason]
    assert all(b.language == "python" for b in used), "only Python blocks are run, so only they can opt out"
    assert all(len((b.reason or "").split()) >= 3 for b in used), "a reason is a sentence, not a word"
    comments = [line for line in text.splitlines() if line.lstrip().startswith("<!-- not run")]
    inside = [line for b in blocks_of(text) for line in b.text.splitlines() if line in comments]
    assert len(comments) - len(inside) == len(used), "the comment stands alone, right above its fence"


@EACH_PAGE
def test_relative_links_lead_to_files(page: Path):
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(text):
        text = text.replace(block.text, "") if block.text.strip() else text
    links = re.findall(r"\]\((?!https?://|mailto:|#)([^)#\s]+)", text)
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{name_of(page)} links to {broken}"


@EACH_PAGE
def test_make_targets_named_in_the_page_exist(page: Path):
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z][\w-]*)[^`]*`", text))
    for block in (b for b in blocks_of(text) if b.language == "console"):
        named |= set(re.findall(r"^(?:\$ )?make ([a-z][\w-]*)", block.text, re.MULTILINE))
    assert named <= targets, f"{name_of(page)} names {sorted(named - targets)}"


PLANTED = """# Page

```python
x = 1
```

<!-- not run: it would take an hour -->
```python
raise SystemExit(1)
```

- in a list

  ```python
  if x == 1:
      raise ValueError("found")
  ```
"""


def test_a_block_that_raises_is_found_at_its_line(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PLANTED)
    program = program_of(page)
    assert "SystemExit" not in program
    with pytest.raises(ValueError, match="found") as caught:
        exec(compile(program, str(page), "exec"), {})
    assert caught.traceback[-1].lineno == PLANTED[: PLANTED.index("raise ValueError")].count("\n")


def test_other_spellings_of_python_are_not_taken_for_python():
    page = "```py\nx\n```\n~~~python\ny\n~~~\n````{note}\n```python\n```\n````"
    assert [b.language for b in blocks_of(page)] == ["py", "python", "{note}"]
