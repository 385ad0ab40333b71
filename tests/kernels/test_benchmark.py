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


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quantize_gpu.main([]) == runner.NO_GPU
    assert capsys.readouterr().out == "no CUDA device: nothing is timed\n"


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
