"""The page docs/verified.md: what the tests marked `cuda` gave, by machine and commit.

Its rows are those that `pytest --record` appends (tests/recording.py). Rows of one commit and machine are one run, done
in several calls. A test file that ran more than once counts as in the run with the most tests, of equal ones the last,
and a test that failed in another one is named still. A row may have a `note`, of what a recorder can't know.
"""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.markdown import Row, moment, prose, table, text, versions

RECORDS = "verified.jsonl"
OUTCOMES = ("passed", "failed", "skipped")
_WHOLE = (0, 1, 5)  # of pytest's exit statuses: all passed, some failed, none collected
Counts = Mapping[str, object]


def _files(row: Row) -> dict[str, Counts]:
    files = row.get("files")
    pairs = files.items() if isinstance(files, Mapping) else ()
    return {str(name): counts for name, counts in pairs if isinstance(counts, Mapping)}


def _count(counts: Counts, outcome: str) -> int:
    value = counts.get(outcome)
    return value if isinstance(value, int) else 0


def _total(counts: Counts) -> int:
    return sum(_count(counts, outcome) for outcome in OUTCOMES)


def _failures(name: str, counts: Counts) -> list[str]:
    failures = counts.get("failures")
    return [f"{name}::{test}" for test in failures] if isinstance(failures, list) else []


def united(rows: Sequence[Row]) -> dict[str, Counts]:
    """The counts of each test file, from rows of one commit and machine, oldest first."""
    found: dict[str, Counts] = {}
    for row in rows:
        for name, counts in _files(row).items():
            if name not in found or _total(counts) >= _total(found[name]):
                found[name] = counts
    return dict(sorted(found.items()))


def _when(row: Row) -> str:
    return text(str(row.get("time") or "an unknown time").replace("T", " ").replace("Z", " UTC"))


def _sums(files: Mapping[str, Counts]) -> list[str]:
    return [str(sum(_count(counts, outcome) for counts in files.values())) for outcome in OUTCOMES]


def _newest(commit: str, rows: Sequence[Row], marked: Sequence[str]) -> list[str]:
    """The newest commit of a machine, in full; with files among `marked` of which nothing ran."""
    files = united(rows)
    sums = ", ".join(f"{n} {outcome}" for n, outcome in zip(_sums(files), OUTCOMES, strict=True))
    out = [f"At commit {text(commit)}, last on {_when(rows[-1])}: {sums}.", ""]
    if commit.endswith("-dirty"):
        out += ["Files differed from that commit.", ""]
    out += [
        f"A session ended early on {_when(row)} (exit status {text(row.get('exit'))}): what it did not reach "
        "is not counted.\n"
        for row in rows
        if row.get("exit", 0) not in _WHOLE
    ]
    out += [line for row in rows if row.get("note") for line in prose(text(row["note"]))]
    out += table(
        ("test file", *OUTCOMES),
        ([text(name), *(str(_count(counts, o)) for o in OUTCOMES)] for name, counts in files.items()),
    )
    failed = [test for name, counts in files.items() for test in _failures(name, counts)]
    others = {
        test for row in rows for name, counts in _files(row).items() for test in _failures(name, counts)
    }
    for title, tests in (
        ("Failed:", failed),
        ("Failed in another run of the same file at this commit:", sorted(others - set(failed))),
        (
            "There are no counts of these files, which have tests marked `cuda`:",
            sorted(set(marked) - files.keys()),
        ),
    ):
        out += [title, "", *(f"- {text(test)}" for test in tests), ""] if tests else []
    return out


def _groups(rows: Iterable[Row], key: Sequence[str]) -> list[list[Row]]:
    """Rows that agree in some keys, oldest first within a group; the group with the newest row first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(repr([row.get(k) for k in key]), []).append(row)
    return sorted(found.values(), key=lambda group: moment(group[-1]), reverse=True)


def verified(rows: Sequence[Row], marked: Sequence[str] = ()) -> str:
    """The page, from rows in any order.

    Args:
        rows: of test runs.
        marked: test files that mark tests with `cuda`, as far as their own text says so.
    """
    rows = sorted(rows, key=moment)
    out = [
        "# Verified",
        "",
        *prose(
            "Which tests ran on a GPU, at which commit, and what they gave. Made by `make pages` from "
            "`benchmarks/results/verified.jsonl`, to which `make test-gpu` appends; a row that was written by hand "
            "says so. Only tests marked `cuda` are counted: the others need no GPU. A run speaks for the commit that "
            "it names, and for no later one."
        ),
    ]
    if not rows:
        out += ["No run has been recorded.", ""]
    for machine in _groups(rows, ("gpu", "torch", "triton", "python")):
        name = text(machine[-1].get("gpu") or "no CUDA device")
        out += [f"## {name}: {versions(machine[-1])}", ""]
        commits = _groups(machine, ("commit",))
        out += _newest(str(commits[0][-1].get("commit") or "unknown"), commits[0], marked)
        if commits[1:]:
            out += ["Earlier commits:", ""]
            out += table(
                ("commit", "last run", *OUTCOMES),
                (
                    [text(group[-1].get("commit") or "unknown"), _when(group[-1]), *_sums(united(group))]
                    for group in commits[1:]
                ),
            )
            for row in (row for group in commits[1:] for row in group if row.get("note")):
                out += prose(f"{text(str(row.get('commit'))[:7])}: {text(row['note'])}")
    return "\n".join(out).rstrip("\n") + "\n"
