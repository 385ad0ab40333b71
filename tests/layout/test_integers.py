"""Strides, extents, overlap and tilings, against plain enumeration."""

from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olq.errors import LayoutError
from olq.layout import check_tiling, contiguous_strides, extent_of, overlaps

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(SHAPES)
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@given(st.data(), SHAPES)
def test_extent_and_overlap_agree_with_enumeration(data: st.DataObject, shape: tuple[int, ...]):
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    places = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*map(range, shape))
    ]
    assert extent_of(shape, strides) == (max(places) + 1 if places else 0)
    if len(set(places)) < len(places):
        assert overlaps(shape, strides)


@given(SHAPES, st.data())
def test_permuted_and_padded_strides_do_not_overlap(shape: tuple[int, ...], data: st.DataObject):
    order = data.draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step = step * max(shape[dim], 1) + data.draw(st.integers(0, 3))
    assert not overlaps(shape, strides)


SPANS = st.dictionaries(
    st.sampled_from(["decode", "prefill", "padding", "mixed"]),
    st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
)


@given(st.integers(0, 5), SPANS)
def test_a_tiling_is_accepted_exactly_if_each_row_has_one_part(rows: int, spans: dict[str, tuple[int, int]]):
    inside = all(0 <= start <= stop <= rows for start, stop in spans.values())
    owners = [sum(start <= row < stop for start, stop in spans.values()) for row in range(rows)]
    if inside and owners == [1] * rows:
        check_tiling(rows, spans, where="attention")
    else:
        with pytest.raises(LayoutError):
            check_tiling(rows, spans, where="attention")


@pytest.mark.parametrize("names", list(permutations(["decode", "prefill"])))
def test_the_message_names_the_rows_between_two_parts(names):
    spans = {"decode": (0, 3), "prefill": (5, 8)}
    with pytest.raises(LayoutError) as caught:
        check_tiling(8, {name: spans[name] for name in names}, where="layers.0.attn")
    assert str(caught.value) == (
        "Parts of an output leave a gap.\n"
        "  where:  layers.0.attn\n"
        "  found:  rows 3..5, between 'decode' and 'prefill', belong to no part (decode 0..3, prefill 5..8)\n"
        "  need:   parts that tile rows 0..8 exactly\n"
        "  remedy: pass the row where each part starts and stops; name rows that nobody computes as padding"
    )


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ({"a": (0, 5), "b": (3, 8)}, r"overlap.*\n.*\n  found:  rows 3..5 belong to 'a' and to 'b'"),
        ({"a": (0, 5)}, r"rows 5..8, after 'a', belong to no part"),
        ({"a": (2, 8)}, r"rows 0..2, between the start and 'a', belong to no part"),
        ({"a": (0, 9)}, r"outside the output.*\n.*\n  found:  'a' has rows 0..9"),
        ({"a": (5, 3)}, r"'a' has rows 5..3"),
        ({}, r"rows 0..8, after the start, belong to no part \(no parts\)"),
    ],
)
def test_the_message_names_the_first_fault(spans, text):
    with pytest.raises(LayoutError, match=text):
        check_tiling(8, spans, where="x")
