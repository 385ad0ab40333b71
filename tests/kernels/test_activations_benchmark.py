"""The benchmark of activations and dummy weights refuses to time wrong bytes. Timing itself needs a GPU."""

import dataclasses

import pytest
import torch

from benchmarks import activations_gpu as benchmark
from benchmarks import runner

EACH = pytest.mark.parametrize("case", benchmark.CASES, ids=lambda case: case.name)


@EACH
def test_the_operators_equal_the_formula(case):
    assert benchmark.check(case, benchmark.activation_of(case, (12, 1024), "cpu")) is None


@EACH
def test_a_wrong_byte_is_found(case):
    def spoiled(x):
        codes, scale = case.plain(x)
        codes[3, 5] ^= 1
        return codes, scale

    x = benchmark.activation_of(case, (12, 1024), "cpu")
    found = benchmark.check(dataclasses.replace(case, plain=spoiled), x)
    assert found is not None
    assert "output 0: 1 of" in found


def test_dummy_weights_equal_the_rule():
    for dtype in benchmark.DUMMY_TYPES:
        assert benchmark.check_dummy(dtype, "cpu") is None


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == runner.NO_GPU
    assert capsys.readouterr().out == "no CUDA device: nothing is timed\n"


@pytest.mark.cuda
@pytest.mark.unaudited(reason="poisoning makes generators, which a capture may not")
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_rows_are_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "SHAPES", ((16, 1024),))
    monkeypatch.setattr(benchmark, "DUMMY", (64, 1024))
    results = tmp_path / "results.jsonl"
    chosen = ["--case", "mxfp8", "--case", "dummy torch.bfloat16"]
    assert benchmark.main([*chosen, "--rounds", "3", "--results", str(results)]) == 0
    assert len(results.read_text().splitlines()) == 2
    assert "share" in capsys.readouterr().out
