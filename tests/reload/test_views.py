"""Views as boxes: every element that a view shows, and no other, with the source's values at the right places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from olq.reload.region import Box, size, slices
from olq.reload.views import mask_boxes, overlaps_itself, resolve, shown, span

PARAMETERS = [
    torch.empty(6, 8, device="meta"),
    torch.empty(3, 4, 6, device="meta"),
    torch.empty(1, 5, 1, device="meta"),
    torch.empty(7, device="meta"),
    torch.empty((), device="meta"),
    torch.empty(6, 4, device="meta").t(),
    torch.empty(6, 8, device="meta")[:, 2:6],  # a column slice of a wider storage
    torch.empty(60, device="meta")[7:31].view(4, 6),
]


@st.composite
def views(draw: st.DrawFn, parameter: Tensor) -> Tensor:
    """A chain of view operators."""
    view = parameter
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(
            st.sampled_from(["slice", "select", "permute", "unflatten", "flatten", "diagonal", "unsqueeze"])
        )
        d = draw(st.integers(0, max(view.dim() - 1, 0)))
        if view.dim() == 0 and kind != "unsqueeze":
            continue
        if kind == "slice":
            start = draw(st.integers(0, view.shape[d] - 1))
            stop, step = draw(st.integers(start + 1, view.shape[d])), draw(st.integers(1, 3))
            view = view[(*(slice(None),) * d, slice(start, stop, step))]
        elif kind == "select":
            view = view.select(d, draw(st.integers(0, view.shape[d] - 1)))
        elif kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind == "unflatten" and view.shape[d] % 2 == 0:
            view = view.unflatten(d, (2, -1))
        elif kind == "flatten" and view.is_contiguous():
            view = view.flatten()
        elif kind == "diagonal" and view.dim() >= 2:
            view = view.diagonal(0, -2, -1)
        elif kind == "unsqueeze":
            view = view.unsqueeze(d)
    return view


def storage_elements(tensor: Tensor) -> Tensor:
    """At each place of a tensor, the number of the element of its storage that stands there."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@settings(max_examples=300)
@given(data=st.data())
def test_a_resolved_view_shows_its_elements_in_the_sources_order(data):
    parameter = data.draw(st.sampled_from(PARAMETERS))
    view = data.draw(views(parameter))
    source = storage_elements(view)
    mappings = resolve(parameter, view)
    if mappings is None:
        return
    elements = storage_elements(parameter)
    for mapping in mappings:
        assert all(r.stop - 1 in r for r in mapping.box)
        assert torch.equal(mapping.source(source), elements[slices(mapping.box)])
    assert sum(size(mapping.box) for mapping in mappings) == view.numel()


@pytest.mark.parametrize(
    ("view", "boxes"),
    [
        (lambda p: p, 1),
        (lambda p: p.t(), 1),
        (lambda p: p[2:5, 1::2], 1),
        (lambda p: p[3], 1),
        (lambda p: p[:, 5], 1),
        (lambda p: p[1, 2], 1),
        (lambda p: p.view(3, 2, 8), 1),
        (lambda p: p.view(3, 2, 2, 4), 1),
        (lambda p: p.view(3, 2, 8)[:2].transpose(1, 2), 2),
        (lambda p: p.view(2, 3, 8)[1], 1),
        (lambda p: p.view(3, 2, 8)[:, 1], 1),
        (lambda p: p.view(3, 2, 2, 4)[:, 1, 0].transpose(0, 1), 1),
        (lambda p: p.view(6, 2, 4).transpose(0, 1), 2),
        (lambda p: p.view(48)[3:31], None),
        (lambda p: p.diagonal(), None),
        (lambda p: p.as_strided((4, 5), (9, 1)), 4),
        (lambda p: p.as_strided((4, 6), (9, 1)), None),
        (lambda p: p.view(48)[8:32], None),
    ],
)
def test_which_views_are_boxes(view, boxes):
    parameter = PARAMETERS[0]
    mappings = resolve(parameter, view(parameter))
    assert (None if mappings is None else len(mappings)) == boxes


@settings(max_examples=200)
@given(data=st.data())
def test_a_mask_shows_a_views_elements(data):
    parameter = data.draw(st.sampled_from(PARAMETERS))
    view = data.draw(views(parameter))
    mask = shown(parameter, view)
    expected = torch.isin(storage_elements(parameter).clone(), storage_elements(view).flatten())
    assert mask.shape == parameter.shape
    assert torch.equal(mask, expected)


def test_a_mask_of_a_view_that_reaches_beyond_the_parameter():
    flat = torch.empty(40)
    parameter = flat[10:22].view(3, 4)
    assert shown(parameter, flat).all()
    assert shown(parameter, flat[:12]).flatten().tolist() == [True] * 2 + [False] * 10
    assert shown(parameter, flat[20:]).flatten().tolist() == [False] * 10 + [True] * 2
    assert resolve(parameter, flat) is None
    assert resolve(parameter, flat[8:12]) is None


def test_a_mask_of_a_view_with_elements_of_another_size():
    parameter = torch.empty(4, 6, dtype=torch.bfloat16)
    as_bytes = parameter.view(torch.uint8)
    assert resolve(parameter, as_bytes) is None
    assert shown(parameter, as_bytes).all()
    assert shown(parameter, as_bytes[:, 2:5]).sum(0).tolist() == [0, 4, 0, 0, 0, 0]  # half an element is none
    as_words = parameter.view(torch.int32)
    assert shown(parameter, as_words[1]).nonzero().tolist() == [[1, k] for k in range(6)]


def test_span_counts_bytes():
    tensor = torch.empty(4, 6, dtype=torch.bfloat16)
    assert span(tensor) == (0, 48)
    assert span(tensor[1:3, 2:4]) == (16, 32)
    assert span(tensor[3, 5]) == (46, 48)


@pytest.mark.parametrize(
    ("view", "overlaps"),
    [
        (lambda t: t, False),
        (lambda t: t[0].expand(3, 8), True),
        (lambda t: t[:1].expand(1, 8), False),
        (lambda t: t.as_strided((3, 4), (2, 1)), True),
        (lambda t: t.as_strided((2, 3), (3, 1)), False),
        (lambda t: t.as_strided((3, 2), (2, 3)), False),  # 0 3 2 5 4 7: interleaved, yet no element twice
        (lambda t: t.as_strided((4, 2), (2, 6)), True),
        (lambda t: t.unfold(1, 3, 1), True),
    ],
)
def test_overlap_is_found(view, overlaps):
    assert overlaps_itself(view(torch.empty(6, 8))) == overlaps


@settings(max_examples=200)
@given(data=st.data())
def test_boxes_of_a_mask_are_disjoint_and_cover_it(data):
    shape = data.draw(st.sampled_from([(), (9,), (5, 7), (2, 3, 4), (2, 2, 3, 3)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    mask = torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    if data.draw(st.booleans()) and shape:  # a product of index sets
        for d, n in enumerate(shape):
            keep = torch.rand(n, generator=generator) < 0.7
            mask = (
                (mask | True) & keep.view(-1, *(1,) * (len(shape) - 1 - d))
                if d == 0
                else mask & keep.view(-1, *(1,) * (len(shape) - 1 - d))
            )
    count = torch.zeros(shape, dtype=torch.int64)
    for box in mask_boxes(mask):
        count[slices(box)] += 1
    assert torch.equal(count, mask.long())


def boxes_of(mask: Tensor) -> list[Box]:
    return list(mask_boxes(mask))


def test_regular_masks_are_few_boxes():
    mask = torch.zeros(100, 64, dtype=torch.bool)
    mask[::2, 3:60] = True
    assert boxes_of(mask) == [(range(0, 99, 2), range(3, 60))]
    mask[1] = True
    assert len(boxes_of(mask)) == 2
    assert boxes_of(torch.ones(2, 3, 4, dtype=torch.bool)) == [(range(2), range(3), range(4))]
    assert boxes_of(torch.zeros(2, 3, dtype=torch.bool)) == []
