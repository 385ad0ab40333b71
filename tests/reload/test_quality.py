"""Figures of error and reports: checked against float64 sums that the test computes itself."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.reload import quality
from olq.report import KeptReport, Report, WeightReport
from olq.testing.memory import measure_memory
from reload.plans import METHODS, RegionLayer, method_id
from reload.small_models import Small, live, state

BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128), "mxfp8": (1, 32), "nvfp4": (1, 16)}


def decibel(signal: Tensor, noise: Tensor) -> float:
    return float(10 * torch.log10(signal.sum() / noise.sum())) if noise.sum() else math.inf


def figures(weight: Tensor, stored: Tensor, parts: tuple[int, ...], block: tuple[int, int]) -> tuple:
    """SQNR of all, and the lowest of a block with its first element."""
    signal, noise = weight.double().square(), (stored.double() - weight.double()).square()
    found, start = [], 0
    for rows in parts:
        height, width = block[0] or rows, block[1] or weight.shape[1]
        for r in range(start, start + rows, height):
            for c in range(0, weight.shape[1], width):
                at = slice(r, min(r + height, start + rows)), slice(c, c + width)
                found.append((decibel(signal[at], noise[at]), (r, c)))
        start += rows
    return decibel(signal, noise), *min(found)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@pytest.mark.parametrize("cut", ["whole", "rows"])
def test_figures_are_those_of_float64(method, cut, monkeypatch):
    name, params = method
    parts, columns = ((130, 70), 100)
    monkeypatch.setattr(quality, "_CHUNK", 5000)  # several bands
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(200, columns, generator=generator) * torch.rand(200, 1, generator=generator).exp()
    weight = weight.bfloat16()
    layer = RegionLayer(name, params, parts, columns)
    with olq.session(layer, measure_error=True) as session:
        if cut == "whole":
            session.feed("weight", weight)
        else:  # every other row, so that regions have a step
            session.feed("weight", weight[::2], (range(0, 200, 2), range(columns)))
            session.feed("weight", weight[1::2], (range(1, 200, 2), range(columns)))
        (report,) = session.commit().weights
    merged = (200,) if params.get("scale_sharing") == "common" else parts
    wanted = figures(
        weight, olq.dequantize(layer, dtype=torch.float32), merged, BLOCKS[params.get("granularity", name)]
    )
    assert (report.sqnr_db, report.worst_db) == pytest.approx(wanted[:2], abs=1e-9)
    assert report.worst_block == wanted[2]


def test_the_worst_block_of_an_expert_weight_names_the_expert():
    weight = torch.ones(3, 16, 64, dtype=torch.bfloat16)
    weight[2, 5, 32:] = torch.randn(32).bfloat16()
    layer = RegionLayer("mxfp8", {}, (16,), 64, lead=(3,))
    (report,) = olq.load(layer, {"weight": weight}, measure_error=True).weights
    assert report.worst_block == (2, 5, 32)


def test_saturated_values_count_as_what_they_were_taken_for():
    weight = torch.randn(16, 32).bfloat16()
    weight[3, 3] = float("nan")
    layer = RegionLayer("fp8", {"nonfinite": "saturate"}, (16,), 32)
    (report,) = olq.load(layer, {"weight": weight}, measure_error=True).weights
    assert 20 < report.sqnr_db < 60


def test_source_precision_keep_compares_with_the_source_as_it_came():
    weight = torch.randn(16, 32)
    layer = RegionLayer("fp8", {"source_precision": "keep"}, (16,), 32)
    (report,) = olq.load(layer, {"weight": weight}, measure_error=True).weights
    stored = olq.dequantize(layer, dtype=torch.float32)
    assert report.sqnr_db == pytest.approx(figures(weight, stored, (16,), (1, 0))[0], abs=1e-9)


@pytest.mark.parametrize("params", [{"granularity": "tensor"}, {"granularity": "block"}])
def test_measuring_costs_a_workspace_not_a_copy(params):
    weight = torch.randn(4096, 1024).bfloat16()
    layer = RegionLayer("fp8", params, (4096,), 1024)
    trace = measure_memory(lambda: olq.load(layer, {"weight": weight}, measure_error=True))
    assert trace.peak_bytes <= trace.final_bytes + (
        14 << 20
    )  # 5 MiB of comparing, 8 of quantizing; 16 a copy


def test_a_report_is_strict_json_and_a_table_also_with_zeros_and_saved_weights():
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 8, bias=False))
    zeros, exact = torch.zeros(16, 32), torch.ones(8, 16)
    report = olq.reload(olq.prepare(model), {"0.weight": zeros, "1.weight": exact * 448}, measure_error=True)
    first, second = report.weights
    assert first.sqnr_db is None
    assert second.sqnr_db == math.inf
    assert "inf" in report.table()
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["weights"][1]["sqnr_db"] == "inf"
    assert data["weights"][0]["shape"] == [16, 32]
    assert data["kernel_bytes"] == report.kernel_bytes
    saved = olq.reload(model, model.state_dict(), measure_error=True)
    assert [w.sqnr_db for w in saved.weights] == [None, None]
    assert "SQNR" not in saved.table()


def test_a_report_counts_what_is_there():
    model = live()
    report = olq.reload(model, {**state(Small()), "unknown": torch.ones(1)}, allow_surplus=["unknown"])
    names = {name: t.nbytes for name, t in model.named_parameters()}
    quantized = ("a.weight", "b.weight", "head.weight")
    assert report.kernel_bytes == sum(n for name, n in names.items() if name.startswith(quantized))
    assert {kept.name: kept.nbytes for kept in report.kept} == {
        name: n for name, n in names.items() if not name.startswith(quantized)
    }
    assert report.source_bytes == sum(t.nbytes for t in Small().parameters())
    assert report.surplus == {"unknown": "allowed by allow_surplus"}
    assert str(report).splitlines()[-1] == "surplus: unknown (allowed by allow_surplus)"
    assert [(w.arrivals, w.direct, w.generation) for w in report.weights] == [
        (1, math.prod(w.shape), 2) for w in report.weights
    ]


def test_an_empty_report_prints():
    assert "0 weights quantized" in Report().table()
    assert Report().as_dict()["bits_per_element"] == 0
    weight = WeightReport("w", "fp8", "why", (0, 4), 0, 0, 0, 0, 1)
    kept = KeptReport("k", (2,), "float32", 8, "why")
    assert "w  " in Report(weights=[weight], kept=[kept]).table()
