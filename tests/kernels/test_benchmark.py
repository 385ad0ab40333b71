"""The benchmark for GPUs refuses to time wrong bytes and says what it lacks. Timing itself needs a GPU."""

import dataclasses

import pytest
import torch

from benchmarks import quantize_gpu, runner
from benchmarks.gpu_cases import CASES, OPS, weight


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_operators_equal_the_formula(case):
    assert quantize_gpu.check(case, weight((256, 384), "cpu")) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_byte_is_found(case):
    def spoiled(w):
        codes, *scales = case.plain(w)
        codes[3, 5] ^= 1
        return codes, *scales

    found = quantize_gpu.check(dataclasses.replace(case, plain=spoiled), weight((256, 384), "cpu"))
    assert found is not None
    assert "output 0: 1 of" in found


def test_cases_call_operators():
    for case in CASES:
        w = weight((128, 128), "cpu")
        for operator, _ in case.calls(w, *case.outputs(w)):
            assert hasattr(OPS, operator)


def test_several_launches_lie_between_two_events(monkeypatch):
    launches, took = [], iter([9.0, 9.0, 4.0, 3.0])  # the first round warms; then copy and olq
    monkeypatch.setattr(quantize_gpu, "milliseconds", lambda run, times: launches.append(times) or next(took))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(quantize_gpu.statistics, "quantiles", lambda values, n: (values[0],) * 3)
    case = next(case for case in CASES if case.name == "mxfp8")
    row = quantize_gpu.large(case, weight((64, 64), "cpu"), 1)
    assert launches == [4] * 4
    assert row["ms"] in (3.0, 4.0)
    assert row["share"] == case.bytes_an_element / 4 * (7.0 - row["ms"]) / row["ms"]


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quantize_gpu.main([]) == runner.NO_GPU
    assert capsys.readouterr().out == "no CUDA device: nothing is timed\n"


def test_a_command_line_that_is_not_understood_is_told_from_every_outcome(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        quantize_gpu.main(["--case", "fp9"])
    assert ended.value.code == 2
    assert (runner.WRONG, runner.MISSED, runner.NO_GPU) == (1, 3, 4)  # as docstrings and pages say
    assert "invalid choice: 'fp9'" in capsys.readouterr().err


def test_missed_targets_are_named():
    row = {"case": "mxfp8", "shape": "1x1", "share": 0.5, "target": 0.9, "scratch_bytes": 9000}
    assert quantize_gpu.missed(row) == [
        "mxfp8, 1x1: share 0.50, target 0.9",
        "mxfp8, 1x1: 9000 bytes of scratch, bound 8192",
    ]
    assert quantize_gpu.missed(row | {"share": 0.95, "scratch_bytes": 0}) == []


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_rows_are_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantize_gpu, "LARGE", (256, 256))
    monkeypatch.setattr(quantize_gpu, "SMALL", (256, 256))
    results = tmp_path / "results.jsonl"
    assert quantize_gpu.main(["--case", "mxfp8", "--rounds", "3", "--results", str(results)]) == 0
    assert len(results.read_text().splitlines()) == 2
    assert "of a copy" in capsys.readouterr().out
