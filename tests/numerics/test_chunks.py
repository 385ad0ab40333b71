"""Boxes cover a tensor exactly once, keep to their budget, and so does the memory of a whole call."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics import cases
from olq.numerics import chunks, source
from olq.testing.memory import measure_memory

SHAPES = st.tuples(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 40), st.integers(1, 90))
UNITS = st.tuples(st.integers(1, 45), st.integers(1, 95))


@given(
    shape=SHAPES, unit=UNITS, budget=st.integers(1, 3000), walk=st.sampled_from((chunks.boxes, chunks.pieces))
)
def test_every_element_is_walked_once(shape, unit, budget, walk):
    lead, n, k = shape
    seen = np.zeros((*lead, n, k), int)
    for box in walk((*lead, n, k), unit, budget):
        seen[box.index] += 1
    assert (seen == 1).all()


@given(shape=SHAPES, unit=UNITS, budget=st.integers(1, 3000))
def test_a_box_holds_whole_units_and_keeps_to_the_budget_unless_it_is_one_unit(shape, unit, budget):
    lead, n, k = shape
    for box in chunks.boxes((*lead, n, k), unit, budget):
        extent = [s.stop - s.start for s in box.index]
        assert box.whole
        assert np.prod(extent) <= max(budget, box.unit[0] * box.unit[1])
        assert extent[-2] % box.unit[0] == extent[-1] % box.unit[1] == 0
        assert box.grid == (box.rows.start // unit[0], box.columns.start // unit[1])
        assert box.unit == (min(unit[0], n - box.rows.start), min(unit[1], k - box.columns.start))


@given(shape=SHAPES, unit=UNITS, budget=st.integers(1, 3000))
def test_a_piece_keeps_to_the_budget_and_holds_whole_units_or_a_part_of_one(shape, unit, budget):
    lead, n, k = shape
    for piece in chunks.pieces((*lead, n, k), unit, budget):
        extent = [s.stop - s.start for s in piece.index]
        assert np.prod(extent) <= budget
        assert piece.grid == (piece.rows.start // unit[0], piece.columns.start // unit[1])
        last_row, last_column = (piece.rows.stop - 1) // unit[0], (piece.columns.stop - 1) // unit[1]
        if piece.whole:
            assert extent[-2] % piece.unit[0] == extent[-1] % piece.unit[1] == 0
        else:
            assert (last_row, last_column) == piece.grid
            assert np.prod(extent[:-2]) == 1


@given(shape=SHAPES, unit=UNITS, budget=st.integers(1, 300), cut=st.integers(1, 100))
def test_pieces_of_a_box_lie_on_its_units(shape, unit, budget, cut):
    """A box is walked in coordinates of its own; each of its units then has the elements that it has in the tensor."""
    lead, n, k = shape
    for box in chunks.boxes((*lead, n, k), unit, budget):
        local = tuple(s.stop - s.start for s in box.index)
        units = np.zeros((*local[:-2], *box.units), int)
        for piece in chunks.pieces(local, box.unit, cut):
            down, across = piece.units
            units[piece.unit_index] += np.prod(local_extent(piece)) // (down * across)
        assert (units == box.unit[0] * box.unit[1]).all()


def local_extent(piece):
    """Rows and columns of a piece."""
    return [s.stop - s.start for s in piece.index[-2:]]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 2, 2), (2, 0, 2, 2), (2, 3, 0)])
def test_an_empty_tensor_has_no_boxes(shape):
    assert list(chunks.boxes(shape, (1, 32), 64)) == list(chunks.pieces(shape, (1, 32), 64)) == []


def test_a_matrix_that_fits_is_one_box():
    assert len(list(chunks.pieces((128, 256), (1, 32), 1 << 17))) == 1
    assert len(list(chunks.pieces((8, 128, 128), (128, 128), 1 << 17))) == 1


def test_a_buffer_is_made_once_and_reused():
    scratch = chunks.Scratch(100, torch.device("cpu"), 8)
    first = scratch.take("x", (10, 10), torch.float32)
    assert scratch.take("x", (5, 4), torch.float32).data_ptr() == first.data_ptr()
    assert scratch.take("y", (5, 4), torch.float32).data_ptr() != first.data_ptr()
    assert scratch.elements == chunks.BYTES // 8


# Few long rows, many short ones, many small matrices, an odd end; each several times the budget.
LARGE = [
    (1, 1 << 22),
    (1 << 17, 32),
    (1 << 18, 16),
    (1 << 18, 9),
    (1 << 19, 1),
    (1 << 15, 8, 8),
    (3, 1_000_001),
]
PROMISED = 8_000_000


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so each time
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize(
    "name", ["fp8-tensor-f32", "fp8-channel-pow2", "fp8-block-f32", "mxfp8-RCEIL", "nvfp4"]
)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {}),
        (torch.bfloat16, {"through": torch.float16, "saturate": True}),
    ],
    ids=["bits", "float32", "through float16"],
)
def test_scratch_is_bounded_whatever_the_shape(name, shape, dtype, options):
    w = torch.ones(shape, dtype=dtype)
    outputs = cases.METHODS[name][0](w)
    held = sum(out.numel() * out.element_size() for out in outputs)
    # The expanded source costs nothing, `through` and `saturate` cost their buffers.
    expanded = w[..., :1].expand(shape)
    trace = measure_memory(lambda: cases.METHODS[name][0](expanded, **options))
    assert trace.peak_bytes - held <= PROMISED


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("name", ["fp8-channel-f32", "mxfp8-RCEIL", "nvfp4"])
def test_a_small_tensor_takes_small_buffers(name):
    w = torch.ones(4, 64, dtype=torch.bfloat16)
    assert measure_memory(lambda: cases.METHODS[name][0](w)).peak_bytes < 16 << 10


@pytest.mark.parametrize(
    ("dtype", "budget", "reads"),
    [
        (torch.float32, chunks.BYTES, 1),  # for the scale and for the codes
        (torch.bfloat16, chunks.BYTES, 1),  # for the codes: its own bits give the scale
        (torch.float32, 4 * 32, 8),  # one row of 128 in four pieces, twice
        (torch.bfloat16, 6 * 32, 4),
    ],
)
def test_what_fits_is_converted_once(monkeypatch, dtype, budget, reads):
    parts = []
    read = source.Source.read
    monkeypatch.setattr(source.Source, "read", lambda self, part: parts.append(part) or read(self, part))
    monkeypatch.setattr(chunks, "BYTES", budget)
    w = torch.linspace(-2, 3, 128, dtype=dtype)[None]
    cases.assert_equals_oracle("fp8-channel-f32", w)
    assert [p.shape for p in parts] == [(1, 128 if reads == 1 else 32)] * reads
