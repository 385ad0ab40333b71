"""What the benchmark checks with, and that the page shows the rows that were measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forward.layers import numbers
from forward.oracle import UNITS, fp8_values
from timing import cold_at_first

from benchmarks import device_time, forward_gpu, runner
from benchmarks.device_time import CALLS, Copy
from benchmarks.markdown import rows_of
from benchmarks.pages import newest

REPO = Path(__file__).resolve().parents[2]
ROWS = newest(rows_of(REPO / "benchmarks" / "results" / "forward_gpu.jsonl"), ("case", "m", "shape"))


@pytest.mark.parametrize("case", forward_gpu.CASES, ids=lambda case: case.name)
def test_the_benchmarks_formula_is_the_oracles(case):
    x = torch.from_numpy(numbers(1, 4, 256)).bfloat16()
    assert UNITS[case.activations] == case.unit
    assert np.array_equal(forward_gpu.plain(x, case.unit).numpy(), fp8_values(x.float().numpy(), case.unit))


def test_without_such_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert forward_gpu.main([]) == runner.NO_GPU
    assert "nothing is timed" in capsys.readouterr().out


@pytest.mark.parametrize(("m", "count"), [(16, CALLS), (forward_gpu.LARGE, forward_gpu.LAYERS)])
def test_a_row_has_times_of_one_call_and_shares_of_all_rows_copies(monkeypatch, m, count):
    copy = Copy(torch.empty(1 << 28, dtype=torch.bfloat16))
    took = {"layer": 10.0, "product": 8.0, "bare": 9.0}  # milliseconds of a graph
    monkeypatch.setattr(forward_gpu, "calls", lambda *_: dict.fromkeys(took, print))
    graphs = iter(took)
    monkeypatch.setattr(forward_gpu, "repeated", lambda calls, least: ((next(graphs), least), least))
    usual = cold_at_first(2, lambda run: 0.5 if callable(run) else took[run[0]] / count * run[1])
    monkeypatch.setattr(device_time, "milliseconds", usual)
    row, taken = forward_gpu.measure(forward_gpu.CASES[0], [], [torch.empty(m, 1)], copy, 3)
    assert [row[f"{name}_us"] for name in took] == [t / count * 1e3 for t in took.values()]
    assert {name: len(values) for name, values in taken.items()} == dict.fromkeys(took, 3)
    assert row["copy_terabytes_a_second"] == (1 << 30) / 0.5 / 1e9
    copy.seen([0.25])  # a later row's
    least = (8192 * 8192 + m * 8192 + 2 * m * 8192) / ((1 << 30) / 0.25)
    found = forward_gpu.shares(m, taken, copy)
    if m == forward_gpu.LARGE:
        assert found["share"] == 0.9
    else:
        assert found["share"] == pytest.approx(least / (8.0 / count))
        assert found["share_of_layer"] == pytest.approx(least / (10.0 / count))
        assert found["least_us"] == pytest.approx(least * 1e3)


def test_rows_are_kept_when_the_copies_of_all_have_been_seen(monkeypatch, tmp_path, capsys):
    copy = Copy(torch.empty(1 << 28, dtype=torch.bfloat16))
    times = iter([0.5, 0.25, 1.0])  # of copies, a row each

    def measure(case, layers, xs, copy, rounds):
        copy.seen([next(times)])
        taken = {"layer": [0.03] * 3, "product": [0.02] * 3, "bare": [0.025] * 3}
        return {f"{name}_us": values[0] * 1e3 for name, values in taken.items()}, taken

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(runner, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(forward_gpu, "copy_of_a_gibibyte", lambda: copy)
    for name in ("made", "inputs"):
        monkeypatch.setattr(forward_gpu, name, lambda _: [None])
    monkeypatch.setattr(forward_gpu, "off", lambda *_: 0.5)
    monkeypatch.setattr(forward_gpu.forward, "path", lambda *_: "somewhere")
    monkeypatch.setattr(forward_gpu, "measure", measure)
    results = tmp_path / "rows.jsonl"
    argv = ["--case", "token", "--results", str(results), "--check"]
    assert forward_gpu.main(argv) == runner.MISSED
    rows = rows_of(results)
    assert [row["m"] for row in rows] == [1, 16, 4096]
    fastest = (1 << 30) / 0.25
    for row, m in zip(rows[:2], (1, 16), strict=True):
        assert row["fastest_terabytes_a_second"] == fastest / 1e9
        assert row["share"] == pytest.approx((8192 * 8192 + 3 * m * 8192) / fastest / 0.02)
        assert (row["gpu"], row["path"], row["error_over_bound"]) == ("none", "somewhere", 0.5)
    assert rows[2]["share"] == pytest.approx(0.025 / 0.03)
    out = capsys.readouterr().out
    assert "target missed: token, M 4096: 0.833, target 0.92" in out
    assert out.count("token   M ") == 3


def test_each_case_was_measured_where_its_values_were_right():
    cases = [(case.name, m) for case in forward_gpu.CASES for m in (*forward_gpu.SMALL, forward_gpu.LARGE)]
    assert [(row["case"], row["m"]) for row in ROWS] == cases
    assert all(0 < row["error_over_bound"] <= 1 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}{row['m']}")
def test_the_page_shows_what_was_measured(row):
    case = next(case for case in forward_gpu.CASES if case.name == row["case"])
    least = f"{row['least_us']:.1f}" if "least_us" in row else ""
    cells = (
        f"`{case.granularity}`, {case.activations}",
        str(row["m"]),
        *(f"{row[f'{name}_us']:.1f}" for name in ("layer", "product", "bare")),
        least,
        f"{row['share']:.3f}",
    )
    page = (REPO / "docs" / "how-to" / "forward.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(cells)} |" in page
    assert forward_gpu.line(row).startswith(case.name)
