"""The benchmark of products refuses to time wrong bits and says what it missed. Timing itself needs a GPU."""

import dataclasses

import pytest
import torch

from benchmarks import linear_gpu, runner
from benchmarks.device_copy import Copy
from benchmarks.linear_cases import CASES

FORMATS = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def weight() -> torch.Tensor:
    return torch.randn(48, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


@FORMATS
def test_products_of_one_hot_rows_equal_the_formula(case):
    assert linear_gpu.check(case, case.quantize(weight())) is None


@FORMATS
def test_a_wrong_bit_is_found(case):
    def spoiled(*tensors):
        w = case.decode(*tensors)
        w[3] *= 1.01
        return w

    found = linear_gpu.check(dataclasses.replace(case, decode=spoiled), case.quantize(weight()))
    assert found is not None
    assert "products differ, 1 rows of x" in found


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert linear_gpu.main([]) == runner.NO_GPU
    assert capsys.readouterr().out == "no CUDA device: nothing is timed\n"


def test_the_fastest_copies_are_the_limit():
    copy = object.__new__(Copy)  # without a GPU
    copy.source, copy.fastest = torch.empty(1 << 20, dtype=torch.bfloat16), 0.0
    rate = 4 * (1 << 20)  # bytes, read and written, in a millisecond
    for times, median, fastest in (([2.0, 1.0, 9.0], 2.0, 2.0), ([0.5], 0.5, 0.5), ([4.0], 4.0, 0.5)):
        seen = copy.seen(times)
        assert seen["copy_terabytes_a_second"] == rate / median / 1e9
        assert seen["fastest_terabytes_a_second"] == rate / fastest / 1e9
        assert copy.milliseconds(rate) == fastest


def test_missed_targets_are_named():
    row = {
        "case": "mxfp8",
        "rows_of_x": 1,
        "share": 0.5,
        "share_target": 0.75,
        "speed": 1.5,
        "speed_target": None,
    }
    assert linear_gpu.missed(row) == ["mxfp8, 1 rows of x: share 0.50, target 0.75"]
    assert linear_gpu.missed(row | {"share": 0.8}) == []


@pytest.mark.cuda
def test_rows_are_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(linear_gpu, "SHAPE", (512, 512))
    monkeypatch.setattr(linear_gpu, "ROWS_OF_X", (1, 40))
    monkeypatch.setattr(linear_gpu, "_CACHE", 1 << 20)
    results = tmp_path / "results.jsonl"
    assert linear_gpu.main(["--case", "mxfp8", "--rounds", "2", "--results", str(results)]) == 0
    assert len(results.read_text().splitlines()) == 2
    assert "of the limit" in capsys.readouterr().out
