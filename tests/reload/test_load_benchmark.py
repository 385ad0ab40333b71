"""The benchmark of loads compares bytes before it times anything."""

import pytest
import torch
from torch import nn

import olq
from benchmarks import load_gpu


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(load_gpu, "VOCABULARY", 50)
    monkeypatch.setattr(load_gpu, "HIDDEN", 64)
    monkeypatch.setattr(
        load_gpu,
        "LAYERS",
        {
            "qkv_proj": (64, {"q_proj": 64, "k_proj": 16, "v_proj": 16}),
            "o_proj": (64, {"o_proj": 64}),
            "gate_up_proj": (64, {"gate_proj": 96, "up_proj": 96}),
            "down_proj": (96, {"down_proj": 64}),
        },
    )


def test_the_files_load_to_the_bytes_of_plain_arithmetic_and_a_wrong_byte_shows(small, tmp_path):
    size = load_gpu.write_files(tmp_path, 3, "cpu")
    assert len(list(tmp_path.iterdir())) > 1
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    model = load_gpu.Model(3, "cpu")
    report = olq.load(model, tmp_path)
    assert len(report.weights) == 12
    assert load_gpu.same_bytes(model, tmp_path, (0, 2))
    for name in ("model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"):
        codes = model.fused[name].get_parameter("weight")
        codes[-1, -1] ^= 1
        assert not load_gpu.same_bytes(model, tmp_path, (0, 2))
        codes[-1, -1] ^= 1
    assert isinstance(model.plain[0], nn.Parameter)
    model.plain[0][0, 0] += 1
    assert not load_gpu.same_bytes(model, tmp_path, ())


def test_the_shape_is_that_of_llama_3_8b():
    elements = sum(torch.Size(shape).numel() for shape in load_gpu.shapes(32).values())
    assert elements == 8_030_261_248
