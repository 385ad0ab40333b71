"""The benchmark of replay refuses to time wrong bytes."""

import pytest
import torch

from benchmarks import reload_gpu, replay
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
        lambda self, pieces, source, name, stored, **later: put(
            self, pieces, source * 2, name, stored, **later
        ),
    )
    assert replay.main(["--layers", "2", "--rounds", "1"]) == 1
    assert "NOT TIMED" in capsys.readouterr().out


def test_the_method_quantizes_again_after_the_clock_has_stopped():
    model = replay.make_model(1)
    before = type(model[0].quant_method).quantize_
    with replay.nothing_quantized(model):
        assert type(model[0].quant_method).quantize_ is not before
    assert type(model[0].quant_method).quantize_ is before


@pytest.mark.parametrize("method", reload_gpu.BYTES)
def test_the_benchmark_of_a_whole_model_compares_bytes_first(method, monkeypatch):
    small = {
        "qkv_proj": (64, {"q_proj": 64, "k_proj": 16, "v_proj": 16}),
        "gate_up_proj": (64, {"gate_proj": 96, "up_proj": 96}),
    }
    monkeypatch.setattr(reload_gpu, "LAYERS", small)
    assert reload_gpu.same_bytes(method, "cpu")
    put = quantized.QuantizedWeight.put

    def spoiled(self, pieces, source, name, stored, *, later=False):
        put(self, pieces, source * 2, name, stored, later=later)

    monkeypatch.setattr(quantized.QuantizedWeight, "put", spoiled)
    assert not reload_gpu.same_bytes(method, "cpu")
