"""The laws of loading, on one layer: order and cut, coverage, memory, bytes."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import olq
from olq.errors import CoverageError, StateError
from olq.methods.state import find_state
from olq.reload.online import load_of
from olq.reload.region import Coverage, size, slices, whole
from reload.plans import (
    METHODS,
    RegionLayer,
    bf16_weights,
    kernel_bytes,
    load_by,
    method_id,
    partitions,
    row_boxes,
)

PARTS = [(5,), (48, 16, 16), (130, 70, 3)]
COLUMNS = [1, 33, 100, 160]


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=12)
@given(data=st.data())
def test_order_and_cut_do_not_matter(method, data):
    name, params = method
    parts, columns = data.draw(st.sampled_from(PARTS)), data.draw(st.sampled_from(COLUMNS))
    weight = data.draw(bf16_weights((sum(parts), columns)))
    boxes = data.draw(partitions(tuple(weight.shape)))
    at_once = load_by(RegionLayer(name, params, parts, columns), weight, [whole(weight.shape)])
    in_pieces = load_by(RegionLayer(name, params, parts, columns), weight, boxes)
    assert kernel_bytes(in_pieces) == kernel_bytes(at_once)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=6)
@given(data=st.data())
def test_experts_are_loaded_in_any_order_and_cut(method, data):
    name, params = method
    weight = data.draw(bf16_weights((3, 40, 70)))
    plan = data.draw(partitions(tuple(weight.shape)))
    at_once = load_by(RegionLayer(name, params, (24, 16), 70, lead=(3,)), weight, [whole(weight.shape)])
    in_pieces = load_by(RegionLayer(name, params, (24, 16), 70, lead=(3,)), weight, plan)
    assert kernel_bytes(in_pieces) == kernel_bytes(at_once)
    one = load_by(RegionLayer(name, params, (24, 16), 70), weight[1], [whole(weight[1].shape)])
    if params.get("scale_layout") != "swizzled_128x4":
        for tensor in ("weight", "weight_scale"):
            assert torch.equal(getattr(in_pieces, tensor)[1], getattr(one, tensor))


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=8)
@given(data=st.data())
def test_parts_are_stored_as_if_they_were_alone(method, data):
    name, params = method
    if params.get("scale_sharing") == "common":
        return  # one scale for all parts is what that asks for
    parts, columns = (130, 70, 3), 100
    weight = data.draw(bf16_weights((sum(parts), columns)))
    fused = load_by(RegionLayer(name, params, parts, columns), weight, list(row_boxes(parts, columns)))
    alone = [
        olq.dequantize(
            load_by(RegionLayer(name, params, (n,), columns), w, [whole(w.shape)]), dtype=torch.float32
        )
        for n, w in zip(parts, weight.split(parts), strict=True)
    ]
    assert torch.equal(olq.dequantize(fused, dtype=torch.float32), torch.cat(alone))


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=6)
@given(data=st.data())
def test_reload_equals_a_fresh_load_at_the_old_addresses(method, data):
    name, params = method
    parts, columns = data.draw(st.sampled_from(PARTS)), data.draw(st.sampled_from(COLUMNS))
    first, second = (data.draw(bf16_weights((sum(parts), columns))) for _ in range(2))
    boxes = data.draw(partitions(tuple(second.shape)))
    warm = load_by(RegionLayer(name, params, parts, columns), first, [whole(first.shape)])
    before = {n: (p.data_ptr(), p.shape, p.stride(), p.dtype) for n, p in warm.named_parameters()}
    aliases = {n: p.detach() for n, p in warm.named_parameters()}
    olq.initialize_layerwise_reload(warm)
    load_by(warm, second, boxes)
    cold = load_by(RegionLayer(name, params, parts, columns), second, [whole(second.shape)])
    assert kernel_bytes(warm) == kernel_bytes(cold)
    assert {n: (p.data_ptr(), p.shape, p.stride(), p.dtype) for n, p in warm.named_parameters()} == before
    assert all(torch.equal(alias, dict(cold.named_parameters())[n]) for n, alias in aliases.items())


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=8)
@given(data=st.data())
def test_staged_bytes_are_those_of_the_units_that_must_wait(method, data):
    """An independent count: elements of every unit that is touched and not whole, after each arrival."""
    name, params = method
    parts, columns = data.draw(st.sampled_from(PARTS)), data.draw(st.sampled_from(COLUMNS))
    weight = data.draw(bf16_weights((sum(parts), columns)))
    boxes = data.draw(partitions(tuple(weight.shape)))
    layer = RegionLayer(name, params, parts, columns)
    olq.initialize_online_processing(layer)
    plan = find_state(layer).plans["weight"]
    arrived = torch.zeros(weight.shape, dtype=torch.bool)
    for box in boxes:
        layer.weight.weight_loader(layer.weight, weight[slices(box)], box)
        arrived[slices(box)] = True
        waiting = 0
        for part, rows in zip(
            range(len(plan.geometry.parts)), arrived.split(plan.geometry.parts), strict=True
        ):
            height, width = plan.unit_of(part)
            for band in rows.split(height):
                for unit in band.split(width, dim=1):
                    waiting += unit.numel() if unit.any() and not unit.all() else 0
        assert load_of(layer).meter.now == waiting * weight.element_size()
    olq.finalize_layerwise_processing(layer)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_each_unit_is_quantized_once(method, monkeypatch):
    name, params = method
    layer = RegionLayer(name, params, (130, 70, 3), 100)
    seen = torch.zeros(203, 100, dtype=torch.int64)
    quantize = layer.quant_method.quantize_

    def count(source, tensors, plan, target):
        start = plan.geometry.starts[target.part]
        rows = range(target.rows.start + start, target.rows.stop + start, target.rows.step)
        seen[slices((rows, target.columns))] += 1
        return quantize(source, tensors, plan, target)

    monkeypatch.setattr(layer.quant_method, "quantize_", count)
    weight = torch.randn(203, 100).bfloat16()
    rows, columns = list(range(203)), [range(0, 50), range(50, 100)]
    boxes = [(range(r, r + 1), c) for r in rows for c in columns]
    random.Random(0).shuffle(boxes)
    load_by(layer, weight, boxes)
    assert (seen == 1).all()


def test_cuts_on_unit_borders_stage_nothing():
    for name, params in METHODS:
        parts = (203,) if params.get("scale_sharing") == "common" else (128, 60, 15)
        layer = RegionLayer(name, params, parts, 96)
        weight = torch.randn(203, 96).bfloat16()
        olq.initialize_online_processing(layer)
        for box in row_boxes(parts, 96):
            layer.weight.weight_loader(layer.weight, weight[slices(box)], box)
        assert load_of(layer).meter.peak == 0
        olq.finalize_layerwise_processing(layer)


@settings(max_examples=30)
@given(data=st.data())
def test_complete_means_covered(data):
    """Any subset of a partition is refused, and what is missing is counted; the rest completes it."""
    weight = data.draw(bf16_weights((40, 64)))
    boxes = data.draw(partitions((40, 64)))
    cut = data.draw(st.integers(0, len(boxes) - 1))
    again = boxes[data.draw(st.integers(0, max(cut - 1, 0)))]
    layer = RegionLayer("fp8", {"granularity": "block"}, (24, 16), 64)
    olq.initialize_online_processing(layer)
    for box in boxes[:cut]:
        layer.weight.weight_loader(layer.weight, weight[slices(box)], box)
    there = sum(map(size, boxes[:cut]))
    found = "nothing arrived" if not there else f"{there} of {40 * 64} elements arrived"
    with pytest.raises(CoverageError, match=rf"weight \({found}"):
        olq.finalize_layerwise_processing(layer)
    if cut:
        with pytest.raises(CoverageError, match="arrived twice"):
            layer.weight.weight_loader(layer.weight, weight[slices(again)], again)
    with pytest.raises(StateError, match="called before its weights were complete"):
        layer.quant_method.apply(layer, torch.randn(2, 64))
    for box in boxes[cut:]:
        layer.weight.weight_loader(layer.weight, weight[slices(box)], box)
    olq.finalize_layerwise_processing(layer)


@settings(max_examples=60)
@given(data=st.data())
def test_coverage_is_a_set(data):
    shape = data.draw(st.sampled_from([(7,), (5, 6), (3, 4, 5), ()]))
    model: set[tuple[int, ...]] = set()
    coverage = Coverage(shape)
    everything = {tuple(i.tolist()) for i in torch.ones(shape).nonzero()} if shape else {()}
    for i in range(data.draw(st.integers(0, 6))):
        ranges = st.builds(range, st.integers(0, 4), st.integers(0, 7), st.integers(1, 3))
        box = tuple(data.draw(ranges)[: max(n, 0)] for n in shape)
        box = tuple(range(r.start, min(r.stop, n), r.step) for r, n in zip(box, shape, strict=True))
        elements = {e for e in everything if all(x in r for x, r in zip(e, box, strict=True))}
        assert (coverage.find(box) is not None) == bool(elements & model)
        coverage.add(box, f"arrival {i}")
        model |= elements
        assert coverage.count == len(model)
        missing = {
            e
            for gap in coverage.missing(limit=10**6)
            for e in everything
            if all(x in r for x, r in zip(e, gap, strict=True))
        }
        assert missing == everything - model
    assert coverage.complete == (model == everything)


@pytest.mark.parametrize("shape", [((3, 5), 0), ((0, 5), 64), ((0,), 0)], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_weight_without_elements_has_no_byte_that_nobody_wrote(method, shape):
    """The audit that runs around every test names such bytes; their values are the same in each load."""
    found = []
    for _ in range(2):
        layer = RegionLayer(*method, *shape)
        olq.initialize_online_processing(layer)
        weight = torch.ones(sum(shape[0]), shape[1], dtype=torch.bfloat16)
        layer.weight.weight_loader(layer.weight, weight, tuple(map(range, weight.shape)))
        olq.finalize_layerwise_processing(layer)
        found.append(kernel_bytes(layer))
    assert found[0] == found[1]
