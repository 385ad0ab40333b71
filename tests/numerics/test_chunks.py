"""Boxes cover a tensor exactly once, keep to their budget, and so does the memory of a whole call."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics import cases
from olq.numerics import chunks
from olq.testing.memory import measure_memory

SHAPES = st.tuples(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 40), st.integers(1, 90))
UNITS = st.tuples(st.integers(1, 45), st.integers(1, 95))


def walked(shape, unit, budget):
    return list(chunks.boxes(shape, unit, budget))


@given(shape=SHAPES, unit=UNITS, budget=st.integers(1, 3000))
def test_boxes_cover_every_element_once(shape, unit, budget):
    lead, n, k = shape
    seen = np.zeros((*lead, n, k), int)
    for group in walked((*lead, n, k), unit, budget):
        for box in group:
            seen[box.index] += 1
    assert (seen == 1).all()


@given(shape=SHAPES, unit=UNITS, budget=st.integers(1, 3000))
def test_boxes_keep_to_the_budget_and_hold_whole_units_or_a_part_of_one(shape, unit, budget):
    lead, n, k = shape
    for group in walked((*lead, n, k), unit, budget):
        assert len({repr((box.lead, box.grid)) for box in group}) == 1
        for box in group:
            extent = [s.stop - s.start for s in box.index]
            assert np.prod(extent) <= max(budget, 1)
            assert box.grid == (box.rows.start // unit[0], box.columns.start // unit[1])
            if box.whole:
                assert len(group) == 1
                assert extent[-2] % box.unit[0] == 0
                assert extent[-1] % box.unit[1] == 0
                assert box.unit == (min(unit[0], n - box.rows.start), min(unit[1], k - box.columns.start))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 2, 2), (2, 0, 2, 2), (2, 3, 0)])
def test_an_empty_tensor_has_no_boxes(shape):
    assert walked(shape, (1, 32), 64) == []


def test_a_matrix_that_fits_is_one_box():
    assert len(walked((128, 256), (1, 32), 1 << 17)) == 1
    assert len(walked((8, 128, 128), (128, 128), 1 << 17)) == 1


def test_a_buffer_is_made_once_and_reused():
    scratch = chunks.Scratch(100, torch.device("cpu"), 8)
    first = scratch.take("x", (10, 10), torch.float32)
    assert scratch.take("x", (5, 4), torch.float32).data_ptr() == first.data_ptr()
    assert scratch.take("y", (5, 4), torch.float32).data_ptr() != first.data_ptr()
    threads = min(torch.get_num_threads(), chunks.THREADS_COUNTED)
    assert scratch.elements == chunks.BYTES * threads // 8


# Few long rows, many short ones, many small matrices, an odd end; each many times the budget.
LARGE = [(1, 1 << 22), (1 << 17, 32), (1 << 19, 1), (1 << 15, 8, 8), (3, 1_000_001)]
PROMISED = 8 << 20
NEEDED = 6 << 20


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so each time
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize(
    "name", ["fp8-tensor-f32", "fp8-channel-pow2", "fp8-block-f32", "mxfp8-RCEIL", "nvfp4"]
)
def test_scratch_is_bounded_whatever_the_shape(name, shape):
    w = torch.ones(shape, dtype=torch.bfloat16)
    outputs = cases.METHODS[name][0](w)
    held = sum(out.numel() * out.element_size() for out in outputs)
    # The expanded source costs nothing, `through` and `saturate` cost their buffers.
    expanded = w[..., :1].expand(shape)
    trace = measure_memory(lambda: cases.METHODS[name][0](expanded, through=torch.float16, saturate=True))
    assert trace.peak_bytes - held <= NEEDED < PROMISED


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("name", ["fp8-channel-f32", "mxfp8-RCEIL", "nvfp4"])
def test_a_small_tensor_takes_small_buffers(name):
    w = torch.ones(4, 64, dtype=torch.bfloat16)
    assert measure_memory(lambda: cases.METHODS[name][0](w)).peak_bytes < 16 << 10
