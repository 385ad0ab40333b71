"""What the benchmark checks with, and that the page shows the rows that were measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forward.layers import numbers
from forward.oracle import UNITS, fp8_values

from benchmarks import forward_gpu, runner
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
        f"{row['share']:.2f}",
    )
    page = (REPO / "docs" / "how-to" / "forward.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(cells)} |" in page
    assert forward_gpu.line(row).startswith(case.name)
