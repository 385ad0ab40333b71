"""What every file of the repository keeps to, beyond what the linters check.

A rule is a function from a file's text to the faults in it, as (line, what). Each rule is also run on planted
faults: a check that cannot fail is worth nothing.
"""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
LONGEST_MODULE = 500  # lines
LARGEST_FILE = 8 * 2**20  # bytes

Fault = tuple[int, str]
Rule = Callable[[str], Iterator[Fault]]


def repository_files() -> list[Path]:
    """Every file that is, or could be, committed."""
    if not (REPO / ".git").exists():
        pytest.skip("needs a git checkout to know which files belong to the project")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout.decode()
    return [path for name in listed.split("\0") if name and (path := REPO / name).is_file()]


def modules(*folders: str) -> list[Path]:
    wanted = [REPO / folder for folder in folders]
    return [p for p in repository_files() if p.suffix == ".py" and any(p.is_relative_to(w) for w in wanted)]


def texts() -> list[Path]:
    """Files that the project wrote: no licence, and nothing that is data for a model."""
    data = {".safetensors", ".png", ".pt", ".bin", ".txt", ".json", ".jsonl"}
    return [p for p in repository_files() if p.suffix not in data and p.name != "LICENSE"]


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)):
                yield part
                yield from at_import(part)
        elif not isinstance(child, ast.Lambda):
            yield from at_import(child)


def too_long(text: str) -> Iterator[Fault]:
    lines = text.count("\n")
    if lines > LONGEST_MODULE:
        yield lines, f"{lines} lines; split it, {LONGEST_MODULE} is the most"


def asserts_or_prints(text: str) -> Iterator[Fault]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: `python -O` removes it; raise an error of olq.errors"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print: return the text, or log it"


def star_imports(text: str) -> Iterator[Fault]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            yield node.lineno, "star import: no reader can tell where a name comes from"


def reads_environment_at_import(text: str) -> Iterator[Fault]:
    for node in at_import(ast.parse(text)):
        attribute = isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
        imported = isinstance(node, ast.Name) and node.id in {"environ", "environb", "getenv"}
        if attribute or imported:
            yield getattr(node, "lineno", 0), "reads an environment variable when it is imported"


def swallows_exceptions(text: str) -> Iterator[Fault]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            if silent or node.type is None:
                yield node.lineno, "an exception that nobody hears of"
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, ast.Attribute | ast.Name) and name == "suppress":
            yield node.lineno, "suppress: an exception that nobody hears of"


def todo_without_link(text: str) -> Iterator[Fault]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b", line) and "https://" not in line:
            yield number, "a note to self; link the place where it is tracked, or do it"


def machine_path(text: str) -> Iterator[Fault]:
    """An absolute path below a folder that differs from machine to machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"(?<![\w.$}/])/(?:home|root|Users|work|workspace|mnt|opt|tmp)/\w", line):
            yield number, "names a folder of somebody's machine"


def imports_olq(text: str) -> Iterator[Fault]:
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "olq" for name in names):
            yield getattr(node, "lineno", 0), "an oracle that imports olq would repeat its faults"


def no_docstring(text: str) -> Iterator[Fault]:
    if not ast.get_docstring(ast.parse(text)):
        yield 1, "a module begins by saying what it is for"


CODE = ("olq", "tests", "examples", "benchmarks", "docs")
RULES: list[tuple[Rule, Callable[[], list[Path]], list[str]]] = [
    (too_long, lambda: modules(*CODE), ["x = 1\n" * 501]),
    (no_docstring, lambda: [p for p in modules(*CODE) if p.stat().st_size], ["x = 1"]),
    (star_imports, lambda: modules(*CODE), ["from os import *"]),
    (asserts_or_prints, lambda: modules("olq"), ["assert x", "print(1)"]),
    (
        swallows_exceptions,
        lambda: modules("olq"),
        ["try:\n    f()\nexcept KeyError:\n    pass", "with contextlib.suppress(KeyError):\n    f()"],
    ),
    (
        reads_environment_at_import,
        lambda: modules("olq"),
        [
            "X = os.environ.get('X')",
            "def f(x=os.getenv('X')):\n    pass",
            "class C:\n    x = os.environ['X']",
        ],
    ),
    (imports_olq, lambda: modules("tests/oracles"), ["from olq.errors import OlqError", "import olq.config"]),
    (todo_without_link, texts, ["# TO" + "DO: later"]),
    (machine_path, texts, ["see /ho" + "me/me/x"]),
]
IDS = [rule.__name__ for rule, _, _ in RULES]
EACH_RULE = pytest.mark.parametrize(("rule", "files", "planted"), RULES, ids=IDS)


@EACH_RULE
def test_every_file_keeps_the_rule(rule: Rule, files: Callable[[], list[Path]], planted: list[str]):
    faults = [
        f"{path.relative_to(REPO)}:{line}: {what}"
        for path in files()
        for line, what in rule(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


@EACH_RULE
def test_the_rule_finds_each_planted_fault(rule: Rule, files: Callable[[], list[Path]], planted: list[str]):
    assert all(list(rule(text)) for text in planted)


def test_reading_the_environment_inside_a_function_is_allowed():
    assert not list(reads_environment_at_import("import os\ndef f():\n    return os.environ['X']"))


def test_no_module_is_a_drawer_for_leftovers():
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}
    found = [p for p in modules("olq") if drawers & set(p.relative_to(REPO).with_suffix("").parts)]
    assert not found, f"say what is in it: {found}"


def test_no_file_is_larger_than_a_checkpoint_may_be():
    large = {str(p.relative_to(REPO)): p.stat().st_size for p in repository_files()}
    large = {name: size for name, size in large.items() if size > LARGEST_FILE}
    assert not large, f"more than {LARGEST_FILE} bytes: {large}"
