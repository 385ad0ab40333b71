"""The benchmark of replay refuses to time wrong bytes."""

import pytest
import torch

from benchmarks import replay
from olq.reload import quantized


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_prints_a_row_for_each_way_and_ends_well(capsys):
    assert replay.main(["--layers", "2", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("counted ", "replayed ", "replayed, queued"))


def test_wrong_bytes_are_not_timed(monkeypatch, capsys):
    put = quantized.QuantizedWeight.put
    monkeypatch.setattr(
        quantized.QuantizedWeight,
        "put",
        lambda self, pieces, source, name, stored: put(self, pieces, source * 2, name, stored),
    )
    assert replay.main(["--layers", "2", "--rounds", "1"]) == 1
    assert "NOT TIMED" in capsys.readouterr().out


def test_the_method_quantizes_again_after_the_clock_has_stopped():
    model = replay.make_model(1)
    before = type(model[0].quant_method).quantize_
    with replay.nothing_quantized(model):
        assert type(model[0].quant_method).quantize_ is not before
    assert type(model[0].quant_method).quantize_ is before
