"""The pages made from results show what the rows hold, and the recorder writes what the tests gave."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recording

from benchmarks import checkout, forward_gpu, gpu_cases, linear_cases, pages, reasons, targets
from benchmarks.verified_page import verified

REPO = Path(__file__).resolve().parents[1]
ROW = {
    "case": "mxfp8",
    "shape": "28672x8192",
    "ms": 0.2,
    "share": 0.95,
    "scratch_bytes": 16,
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.3",
    "time": "2026-11-30T10:00:00Z",
}


def results(folder: Path, *rows: dict[str, object], name: str = "quantize_gpu") -> str:
    folder = folder / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pages.results(folder)


def lines(page: str, *words: str) -> list[list[str]]:
    """Cells of the lines of tables in which all these words stand."""
    found = [line for line in page.splitlines() if line.startswith("|") and all(w in line for w in words)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]


# -- results ------------------------------------------------------------------------------------------------


def test_the_committed_pages_are_what_the_committed_rows_give(capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_out_of_date_is_named_and_then_written(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert pages.main(["--check"], tmp_path) == 1
    out = capsys.readouterr().out
    assert (
        "docs/results.md: not what the rows in benchmarks/results give; run `make pages` and commit it" in out
    )
    assert not list((tmp_path / "docs").iterdir())
    assert pages.main([], tmp_path) == 0
    assert pages.main(["--check"], tmp_path) == 0
    assert "No run has been recorded." in (tmp_path / "docs" / "verified.md").read_text()


def test_a_row_shows_its_case_target_time_memory_and_origin(tmp_path):
    versions = "torch 2.11.0, Triton 3.6.0, Python 3.12.3"
    assert lines(results(tmp_path, ROW), "0.950") == [
        [
            "mxfp8, 28672x8192",
            "share of a copy's rate",
            *("0.950", "≥ 0.90", "yes", "0.2 ms", "scratch 16 B", "NVIDIA H200", versions, "2026-11-30"),
        ]
    ]


@pytest.mark.parametrize(
    ("share", "shown", "met"),
    [(0.9, "0.900", "yes"), (0.8996, "0.8996", "**not met**"), (0.5, "0.500", "**not met**")],
)
def test_a_row_below_its_target_shows_as_not_met_however_near(tmp_path, share, shown, met):
    page = results(tmp_path, {**ROW, "share": share})
    [cells] = lines(page, "mxfp8, 28672x8192")
    assert cells[2:5] == [shown, "≥ 0.90", met]
    listed = (
        f"- Quantization of weights: mxfp8, 28672x8192, share of a copy's rate: {shown}, target ≥ 0.90"
        in page
    )
    assert listed == (met != "yes")
    assert ("1 is met, 0 are not" if met == "yes" else "0 are met, 1 is not") in page


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_what_was_tried_is_said_once_of_cases_that_miss_their_targets(tmp_path, monkeypatch, share):
    known = reasons.Reason("forward_gpu", {"m": 16}, "Half of it was tried.\n\nThe rest was not.")
    monkeypatch.setattr(reasons, "REASONS", (known,))
    rows = [
        {"case": case, "m": 16, "shape": "8192x8192", "share": share, "gpu": "NVIDIA H200"}
        for case in ("token", "block")
    ]
    page = results(tmp_path, *rows, name="forward_gpu")
    said = "- **token, M = 16, 8192x8192; block, M = 16, 8192x8192.** Half of it was tried."
    assert page.count(said) == int(share < 0.8)
    assert page.count("\n\n  - The rest was not.\n") == int(share < 0.8)
    assert ("what was tried:" in page) == (share < 0.8)


def test_each_reason_is_about_a_target():
    for reason in reasons.REASONS:
        assert any(
            t.benchmark == reason.benchmark and reason.where.items() <= dict(t.where).items()
            for t in targets.TARGETS
        ), reason


@pytest.mark.parametrize(("ratio", "met"), [(1.4, "yes"), (1.5, "**not met**")])
def test_a_ratio_to_a_limit_has_to_be_small(tmp_path, ratio, met):
    row = {"case": "reload mxfp8", "layers": 32, "times_limit": ratio, "gpu": "NVIDIA H200"}
    [cells] = lines(results(tmp_path, row, name="reload_gpu"), "reload mxfp8")
    assert cells[3:5] == ["≤ 1.40", met]


def test_the_newest_row_of_a_case_on_each_gpu_is_shown_wherever_it_stands(tmp_path):
    rows = (
        {**ROW, "share": 0.91, "time": "2026-11-30T12:00:00Z"},
        {**ROW, "share": 0.92, "time": "2026-11-29T12:00:00Z"},
        {**ROW, "share": 0.5, "gpu": "another"},
        {**ROW, "share": 0.94, "shape": "1x1"},
    )
    found = [(cells[2], cells[3], cells[7]) for cells in lines(results(tmp_path, *rows), "2026-")]
    assert found == [
        ("0.910", "≥ 0.90", "NVIDIA H200"),
        ("0.500", "–", "another"),
        ("0.940", "–", "NVIDIA H200"),
    ]


def test_each_target_without_a_row_shows_as_not_measured(tmp_path):
    (tmp_path / "results").mkdir()
    page = pages.results(tmp_path / "results")
    assert len(lines(page, "**not measured**")) == len(targets.TARGETS)
    assert f"0 are met, 0 are not, and {len(targets.TARGETS)} are without a measured row" in page


def test_files_and_keys_that_nobody_knows_are_shown_and_break_nothing(tmp_path):
    odd = {"case": "a|b <i> {x}`y`", "weird": [1, "two"], "speed": 1.23456, "rows": 3, "more": {"x": None}}
    page = results(tmp_path, odd, {}, {"time": 7, "gpu": None}, name="made_up")
    assert "## made\\_up" in page
    assert lines(page, "speed")[0][:2] == [
        "a\\|b \\<i\\> \\{x}\\`y\\`, rows 3",
        "weird \\[1, 'two'\\], speed 1.235, more \\{'x': None}",
    ]
    page = results(
        tmp_path, {**ROW, "unheard": {"of": [1]}}, {"case": "mxfp8"}, {"share": "fast", "speed": 2.5}
    )
    assert len(lines(page, "0.950")) == 1
    assert "Rows without a figure that is known:" in page
    assert lines(page, "speed 2.5")[0][0] == "share fast"


@pytest.mark.parametrize(("line", "fault"), [("{", "not JSON"), ("[1]", "a row is a JSON object")])
def test_a_line_that_is_no_row_is_named(tmp_path, line, fault):
    (tmp_path / "x.jsonl").write_text(f"{{}}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"x\.jsonl:3: .*{fault}"):
        pages.results(tmp_path)


def bounds(benchmark: str, figure: str, **where: object) -> dict[object, float]:
    return {
        t.where["case"]: t.bound
        for t in targets.TARGETS
        if (t.benchmark, t.figure) == (benchmark, figure) and targets.holds(where, t.where)
    }


def test_targets_are_those_that_the_benchmarks_check():
    cases = gpu_cases.CASES
    assert bounds("quantize_gpu", "share") == {case.name: case.target for case in cases}
    for figure in ("in_a_row_ratio", "single_ratio"):
        assert bounds("quantize_gpu", figure) == {case.name: gpu_cases.SPEEDUP for case in cases}
    for m, bound in forward_gpu.TARGETS.items():
        assert bounds("forward_gpu", "share", m=m) == {case.name: bound for case in forward_gpu.CASES}
    for m in linear_cases.FEW:
        assert bounds("linear_gpu", "share", rows_of_x=m) == {c.name: c.share for c in linear_cases.CASES}
    assert bounds("linear_gpu", "speed", rows_of_x=linear_cases.MANY) == {
        c.name: c.speed for c in linear_cases.CASES
    }


# -- verified -----------------------------------------------------------------------------------------------


def record(commit: str, hour: int, files: dict[str, tuple[int, int, int, list[str]]], **more: object) -> dict:
    names = ("passed", "failed", "skipped", "failures")
    return {
        "time": f"2026-11-30T{hour:02}:00:00Z",
        "commit": commit,
        **{
            "gpu": "NVIDIA H200",
            "driver": "580",
            "torch": "2.11",
            "triton": "3.6",
            "python": "3.12",
            "exit": 0,
        },
        "files": {name: dict(zip(names, counts, strict=True)) for name, counts in files.items()},
        **more,
    }


def test_files_of_which_nothing_ran_are_named():
    page = verified([record("aaa", 9, {"tests/a.py": (7, 0, 0, [])})], ["tests/a.py", "tests/b.py"])
    assert "There are no counts of these files, which have tests marked `cuda`:\n\n- tests/b.py\n" in page


def test_rows_of_a_commit_and_machine_are_united_newest_commit_first():
    page = verified(
        [
            record("bbb", 11, {"tests/b.py": (1, 0, 3, [])}),
            record("aaa", 9, {"tests/a.py": (7, 0, 0, [])}),
            record("bbb", 10, {"tests/a.py": (4, 1, 0, ["test_x[1|2]"])}, exit=1),
            record("ccc-dirty", 8, {}, gpu=None, driver=None, exit=2),
        ]
    )
    assert "There are no counts of these files" not in page
    assert "At commit bbb, last on 2026-11-30 11:00:00 UTC: 5 passed, 1 failed, 3 skipped." in page
    assert lines(page, "tests/") == [["tests/a.py", "4", "1", "0"], ["tests/b.py", "1", "0", "3"]]
    assert "Failed:\n\n- tests/a.py::test\\_x\\[1\\|2\\]\n" in page
    assert lines(page, "aaa") == [["aaa", "2026-11-30 09:00:00 UTC", "7", "0", "0"]]
    heads = [line for line in page.splitlines() if line.startswith("##")]
    assert heads == [
        "## NVIDIA H200: driver 580, torch 2.11, Triton 3.6, Python 3.12",
        "## no CUDA device: torch 2.11, Triton 3.6, Python 3.12",
    ]
    assert "Files differed from that commit." in page
    assert "A session ended early on 2026-11-30 08:00:00 UTC (exit status 2)" in page


def test_a_run_of_part_of_a_file_does_not_hide_what_failed_before():
    whole = record("aaa", 9, {"tests/a.py": (7, 1, 0, ["test_x"])})
    page = verified([whole, record("aaa", 10, {"tests/a.py": (1, 0, 0, [])})])
    assert "7 passed, 1 failed" in page
    page = verified([whole, record("aaa", 10, {"tests/a.py": (8, 0, 0, [])})])
    assert "8 passed, 0 failed" in page
    assert "Failed in another run of the same file at this commit:\n\n- tests/a.py::test\\_x" in page


def test_a_note_is_shown():
    rows = [
        record("aaa", 9, {"tests/a.py": (7, 0, 0, [])}),
        record("aaa", 10, {}, note="One *failed* once."),
    ]
    page = verified(rows)
    assert "7 passed, 0 failed, 0 skipped.\n\nOne \\*failed\\* once.\n" in page
    page = verified([*rows, record("bbb", 11, {})])
    assert "| aaa | 2026-11-30 10:00:00 UTC | 7 | 0 | 0 |\n\naaa: One \\*failed\\* once.\n" in page


def test_records_that_nobody_knows_break_nothing():
    page = verified(
        [{}, {"commit": None, "files": {"a": 1, "b": {"passed": "x", "failures": 2}}, "exit": None}]
    )
    assert "At commit unknown" in page
    assert lines(page, "b") == [["b", "0", "0", "0"]]


# -- recorder -----------------------------------------------------------------------------------------------

TESTS = """
import os
import pytest

@pytest.fixture
def breaks_before():
    raise ValueError

@pytest.fixture
def breaks_after():
    yield
    raise ValueError

@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 2])
def test_passes(n): pass

@pytest.mark.cuda
def test_fails(): raise ValueError

@pytest.mark.cuda
def test_skips(): pytest.skip("for a reason")

@pytest.mark.cuda
def test_cannot_begin(breaks_before): pass

@pytest.mark.cuda
def test_cannot_end(breaks_after): pass

@pytest.mark.parametrize("name", ["cuda"])
def test_needs_no_gpu(name): raise ValueError
"""
CRASHES = """
@pytest.mark.cuda
def test_crashes(): os._exit(3)
"""


def recorded(folder: Path, source: str, *options: str) -> list[dict]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    (folder / "test_tiny.py").write_text(source)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "recording",
        "-p",
        "no:cacheprovider",
        "--record",
        "to/rows.jsonl",
    ]
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests")))},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "to" / "rows.jsonl").read_text().splitlines()]


def test_the_recorder_writes_one_row_of_the_marked_tests(tmp_path):
    for count in (1, 2):
        rows = recorded(tmp_path, TESTS)
        assert len(rows) == count
    failures = ["test_cannot_begin", "test_cannot_end", "test_fails"]
    assert rows[0]["files"] == {
        "test_tiny.py": {"passed": 2, "failed": 3, "skipped": 1, "failures": failures}
    }
    assert {key: rows[0][key] for key in recording.machine()} == recording.machine()
    assert rows[0]["exit"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", rows[0]["time"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", rows[0]["commit"]) or "OLQ_COMMIT" in os.environ
    assert "2 passed, 3 failed, 1 skipped" in verified(rows)


def test_with_workers_the_controller_alone_writes_and_a_crash_is_a_failure(tmp_path):
    [row] = recorded(tmp_path, TESTS + CRASHES, "-n", "2")
    failures = ["test_cannot_begin", "test_cannot_end", "test_crashes", "test_fails"]
    assert row["files"] == {"test_tiny.py": {"passed": 2, "failed": 4, "skipped": 1, "failures": failures}}


def test_an_outcome_of_another_plugin_counts_as_nothing(tmp_path):
    recorder = recording.Recorder(tmp_path / "rows.jsonl")
    for outcome in ("rerun", "passed"):
        facts: dict[str, Any] = {"keywords": {}, "outcome": outcome, "longrepr": None, "when": "call"}
        facts |= {"nodeid": "t.py::test_a", "location": ("t.py", 1, "a"), "user_properties": [recording.MARK]}
        recorder.pytest_runtest_logreport(pytest.TestReport(**facts))
    assert recorder.files() == {"t.py": {"passed": 1, "failed": 0, "skipped": 0, "failures": []}}


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_a_commit_is_dirty_when_files_differ_but_results_do_not_count(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "verified.jsonl").write_text("{}\n")
    assert checkout.commit(tmp_path) == head
    (tmp_path / "b.py").write_text("")
    assert checkout.commit(tmp_path) == f"{head}-dirty"


def test_without_git_the_environment_names_the_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").write_text("no repository")
    monkeypatch.setenv("OLQ_COMMIT", "abc-dirty")
    assert checkout.commit(tmp_path) == "abc-dirty"
    monkeypatch.delenv("OLQ_COMMIT")
    assert checkout.commit(tmp_path) == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout.commit(tmp_path) == "unknown"
