"""Write the pages docs/results.md and docs/verified.md from the rows in benchmarks/results.

    python -m benchmarks.pages [--check]

docs/results.md    of each benchmark the newest row of each case on each GPU, beside what `targets.py` asks for
docs/verified.md   what the tests marked `cuda` gave, by commit and machine: verified_page.py

With --check nothing is written; exit status 1 if a page is not what the rows give. A file of rows that `targets.py`
does not know is shown with all its numbers.
"""

import argparse
import ast
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.markdown import DASH, Row, moment, prose, rows_of, table, text, versions
from benchmarks.reasons import reason_of
from benchmarks.targets import BENCHMARKS, GPU, TARGETS, Benchmark, Figure, Target, holds
from benchmarks.verified_page import RECORDS, verified

REPO = Path(__file__).resolve().parents[1]
COLUMNS = (
    "case",
    "figure",
    "value",
    "target",
    "met",
    "time",
    "extra memory",
    "machine",
    "versions",
    "date, commit",
)
MACHINE = {"gpu", "capability", "cuda", "driver", "torch", "triton", "python", "time"}


def number(value: object) -> float | None:
    """A number, or the median of a list of numbers; None for everything else."""
    if isinstance(value, list) and value and all(number(v) is not None for v in value):
        return statistics.median(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def at(row: Row, key: str) -> float | None:
    """The number at a key; a dot leads into an object inside."""
    value: object = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return number(value)


def duration(key: str, value: float) -> str:
    """A time with the unit that its key names."""
    name = key.split(".")[0]
    unit = "us" if name.endswith("us") else "ms" if name.endswith("ms") else "s"
    return f"{value:.4g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def size(value: float) -> str:
    """Bytes, readable."""
    for unit, limit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e4)):
        if value >= limit:
            return f"{value / (1e3 if unit == 'kB' else limit):.3g} {unit}"
    return f"{value:.0f} B"


def rounded(value: float, target: Target | None) -> str:
    """Two decimals from 10 on, else three; more where fewer would show the other side of the target."""
    for digits in range(2 if abs(value) >= 10 else 3, 12):
        shown = f"{value:.{digits}f}"
        if target is None or target.met(float(shown)) == target.met(value):
            return shown
    return repr(value)


def origin(row: Row) -> list[str]:
    """The last cells: machine, versions, date and commit, which rows of before 117bfe2 don't name."""
    day, commit = str(row.get("time", DASH))[:10], str(row.get("commit") or "")
    short = commit[:7] + "-dirty" * commit.endswith("-dirty")
    return [text(row.get("gpu") or "unknown"), versions(row), text(f"{day}, {short}" if short else day)]


def newest(rows: Iterable[Row], cases: Sequence[str]) -> list[Row]:
    """Of each case on each GPU the row with the latest time, in the file's order of cases."""
    found: dict[str, Row] = {}
    for row in rows:
        key = json.dumps([row.get("gpu"), *(row.get(name) for name in cases)])
        if key not in found or moment(row) >= moment(found[key]):
            found[key] = row
    return list(found.values())


def case_of(row: Mapping[str, object], cases: Sequence[str]) -> str:
    """A case in words."""
    words = {"case": "", "shape": "", "m": "M = ", "rows_of_x": "M = ", "layers": "layers: "}
    return ", ".join(f"{words.get(key, f'{key} ')}{text(row[key])}" for key in cases if key in row)


def target_of(name: str, figure: Figure, row: Row) -> Target | None:
    """What the figure has to reach."""
    if row.get("gpu") != GPU:
        return None
    fitting = (t for t in TARGETS if (t.benchmark, t.figure) == (name, figure.key) and holds(t.where, row))
    return next(fitting, None)


def bound(target: Target) -> str:
    """A target as text."""
    return f"{'≤' if target.most else '≥'} {target.bound:.2f}"


Line = tuple[Target | None, list[str]]


def figures(benchmark: Benchmark, row: Row) -> list[Line]:
    """The lines of one row."""
    found: list[Line] = []
    for figure in benchmark.figures:
        value = at(row, figure.key)
        if value is None or not holds(figure.where, row):
            continue
        target = target_of(benchmark.name, figure, row)
        taken = {key: at(row, key) for key in figure.times}
        times = [
            f"{figure.times[key]} {duration(key, t)}".strip() for key, t in taken.items() if t is not None
        ]
        extra = [
            f"{label} {size(b)}" for key, label in benchmark.extra.items() if (b := at(row, key)) is not None
        ]
        cells = [
            case_of(row, benchmark.cases),
            figure.label,
            rounded(value, target),
            bound(target) if target else DASH,
            ("yes" if target.met(value) else "**not met**") if target else DASH,
            "; ".join(times) or DASH,
            "; ".join(extra) or DASH,
            *origin(row),
        ]
        found.append((target, cells))
    return found


def absent(benchmark: Benchmark, seen: Sequence[Target | None]) -> list[list[str]]:
    """A line for each target that no row is held against."""
    found = []
    for target in TARGETS:
        if target.benchmark == benchmark.name and target not in seen:
            labels = [
                f.label for f in benchmark.figures if f.key == target.figure and holds(f.where, target.where)
            ]
            cells = [
                case_of(target.where, benchmark.cases),
                labels[0],
                DASH,
                bound(target),
                "**not measured**",
            ]
            found.append([*cells, DASH, DASH, GPU, DASH, DASH])
    return found


def plain_table(rows: Iterable[Row]) -> list[str]:
    """Rows that nothing is known about: words and whole numbers tell cases apart, all else is shown beside them."""
    found: dict[str, tuple[Row, list[str]]] = {}
    for row in rows:
        other = {k: v for k, v in row.items() if k not in MACHINE}
        words = {k: v for k, v in other.items() if isinstance(v, str | int) and not k.endswith("_bytes")}
        case = ", ".join(str(v) if k == "case" else f"{k} {v}" for k, v in words.items())
        numbers = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in other.items() if k not in words}
        cells = [
            text(case) or DASH,
            text(", ".join(f"{k} {v}" for k, v in numbers.items())) or DASH,
            *origin(row),
        ]
        key = f"{case} {row.get('gpu')}"
        if key not in found or moment(row) >= moment(found[key][0]):
            found[key] = row, cells
    return table(("case", "numbers", *COLUMNS[-3:]), (cells for _, cells in found.values()))


def section(
    name: str,
    rows: Sequence[Row],
    count: dict[str, list[str]],
    reasons: dict[str, list[str]],
    folder: Path,
) -> list[str]:
    """One benchmark; what became of its targets is added to `count`, and why some are not met to `reasons`."""
    known = next((b for b in BENCHMARKS if b.name == name), None)
    out = [f"## {known.title if known else text(name)}", ""]
    if known:
        out += prose(known.against)
    if known or (folder.parent / f"{name}.py").exists():
        out += [
            "```console",
            f"python -m benchmarks.{name} --results benchmarks/results/{name}.jsonl",
            "```",
            "",
        ]
    if known is None:
        return out + plain_table(rows)
    lines: list[Line] = []
    other: list[Row] = []
    for row in newest(rows, known.cases):
        found = figures(known, row)
        lines += found
        other += [] if found else [row]
    missing = absent(known, [target for target, _ in lines])
    for target, cells in [*lines, *((None, cells) for cells in missing)]:
        met = cells[4].strip("*")
        if met in count:
            entry = f"{known.title}: {cells[0]}, {cells[1]}: {cells[2]}, target {cells[3]}"
            count[met].append(entry)
            if target and met == "not met" and (reason := reason_of(target)):
                reasons.setdefault(reason, []).append(cells[0])
    out += table(COLUMNS, [*(cells for _, cells in lines), *missing])
    return out + (["Rows without a figure that is known:", "", *plain_table(other)] if other else [])


def _are(some: Sequence[str]) -> str:
    """How many there are, with the verb."""
    return f"{len(some)} {'is' if len(some) == 1 else 'are'}"


def results(folder: Path) -> str:
    """The page docs/results.md, from a folder of files of rows."""
    files = {file.stem: rows_of(file) for file in sorted(folder.glob("*.jsonl")) if file.name != RECORDS}
    names = [b.name for b in BENCHMARKS] + [
        name for name in files if name not in {b.name for b in BENCHMARKS}
    ]
    count: dict[str, list[str]] = {"yes": [], "not met": [], "not measured": []}
    body: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in names:
        body += section(name, files.get(name, []), count, reasons, folder)
    out = [
        "# Results",
        "",
        *prose(
            "Made by `make pages` from the rows in `benchmarks/results`, which the benchmarks append when they run. "
            f"Of each case the newest row on each GPU is shown. Targets hold on one {GPU} and stand in "
            "`benchmarks/targets.py`. They bound shares and ratios, both sides of which were measured in one run; "
            "times and bytes are information. Of a target that is not met, `benchmarks/reasons.py` says what was "
            "tried. Commands run in an environment with a CUDA torch; without a GPU they time nothing and end with "
            "status 4."
        ),
        f"Of {sum(map(len, count.values()))} targets {_are(count['yes'])} met, {_are(count['not met'])} not, and "
        f"{_are(count['not measured'])} without a measured row.",
        "",
    ]
    for word in ("not met", "not measured"):
        if count[word]:
            out += [f"{word.capitalize()}:", "", *(f"- {entry}" for entry in count[word]), ""]
    if reasons:
        out += ["What profiles say of those that are not met, and what was tried:", ""]
        for reason, cases in reasons.items():
            first, *others = reason.split("\n\n")
            out += prose(f"- **{'; '.join(cases)}.** {first}")
            for paragraph in others:
                out += prose(f"  - {paragraph}")
    return "\n".join(out + body).rstrip("\n") + "\n"


def _marked(root: Path) -> list[str]:
    """Test files whose code marks tests with `cuda`."""
    return sorted(
        file.relative_to(root).as_posix()
        for file in (root / "tests").rglob("test_*.py")
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node).endswith("mark.cuda")
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        )
    )


def pages(root: Path = REPO) -> dict[Path, str]:
    """What each page has to be."""
    folder = root / "benchmarks" / "results"
    records = folder / RECORDS
    return {
        root / "docs" / "results.md": results(folder),
        root / "docs" / "verified.md": verified(rows_of(records) if records.exists() else [], _marked(root)),
    }


def main(argv: list[str] | None = None, root: Path = REPO) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is out of date")
    check, status = parser.parse_args(argv).check, 0
    for page, wanted in pages(root).items():
        name = page.relative_to(root)
        if page.exists() and page.read_text(encoding="utf-8") == wanted:
            print(f"{name}: up to date")
        elif check:
            print(f"{name}: not what the rows in benchmarks/results give; run `make pages` and commit it")
            status = 1
        else:
            page.write_text(wanted, encoding="utf-8")
            print(f"{name}: written")
    return status


if __name__ == "__main__":
    sys.exit(main())
