"""Where kernels of products read: each word of codes once, and nothing beyond a tensor.

Triton's interpreter runs them, and its loads are recorded.
"""

import numpy as np
import pytest
import torch
from kernels.compare import INTERPRETED
from kernels.linear_cases import FORMATS, make
from kernels.loads import show_loads

from olq import kernels
from olq.kernels import plan_shares, plans
from olq.kernels.shapes import Plan

pytestmark = INTERPRETED


@pytest.fixture
def loads(monkeypatch):
    """(addresses, bytes of an element) of each load."""
    found = []

    def record(pointers, mask):
        there = mask.data.astype(bool)
        addresses = np.broadcast_to(pointers.data, there.shape)[there].astype(np.int64)
        if there.any():
            found.append((addresses, pointers.get_element_ty().primitive_bitwidth // 8))

    show_loads(monkeypatch, record)
    return found


def within(addresses: np.ndarray, size: int, t: torch.Tensor) -> bool:
    """Whether all elements of a load are elements of a tensor's storage range."""
    first, end = t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()
    return bool(((addresses >= first) & (addresses + size <= end)).all())


@pytest.mark.parametrize("shares", [1, 4, 16])
@pytest.mark.parametrize(("m", "k"), [(2, 700), (9, 1157), (20, 1536), (40, 1100)])
@pytest.mark.parametrize("form", FORMATS)
def test_each_word_of_codes_is_read_once_and_nothing_beyond_a_tensor(form, m, k, shares, loads, monkeypatch):
    monkeypatch.setattr(plan_shares, "_MOST_SHARES", shares)
    weight = make(form, [21, 30], k, decode=False)
    codes, *scales = weight.tensors
    x, out = torch.ones(m, k, dtype=torch.bfloat16), torch.empty(m, 51, dtype=torch.bfloat16)
    plan = plans.plan(weight.operator, (out, *weight.args(x, None)))
    assert isinstance(plan, Plan)
    with np.errstate(all="ignore"):
        assert kernels.launch(weight.operator, weight.args(x, None), (out,))
    count = np.zeros(tuple(codes.shape), np.int64)
    for addresses, size in loads:
        if within(addresses, size, codes):
            assert size == 8  # a word
            np.add.at(count.reshape(-1), addresses - codes.data_ptr(), 1)
        elif not any(within(addresses, size, t) for t in (x, *scales)):
            # What a second kernel adds is memory of the call.
            assert size == 4
            assert plan.launches[-1].kernel == "linear_wide.add"
    words = -(-k // (16 if form.startswith("nvfp4") else 8))
    times = plan.launches[0].grid[1]  # programs that have the same weights, and other rows of x
    for rows, start in zip(weight.parts, weight.starts, strict=True):
        part = count[start : start + rows]
        assert (part[:-1, : 8 * words : 8] == times).all()
        assert (part[-1, : 8 * words : 8] >= times).all()  # it stands for rows beyond it
        assert not part[:, 8 * words :].any()


@pytest.mark.parametrize("form", ["mxfp8 linear", "mxfp8 swizzled_128x4"])
def test_scales_of_a_step_are_asked_for_before_its_codes(form, loads):
    # Decoding begins with them. When they came last, mxfp8 took 4 to 7 % longer on a GPU.
    weight = make(form, [32], 1024, decode=False)
    codes, scales = weight.tensors
    x, out = torch.ones(20, 1024, dtype=torch.bfloat16), torch.empty(20, 32, dtype=torch.bfloat16)
    plan = plans.plan(weight.operator, (out, *weight.args(x, None)))
    assert isinstance(plan, Plan)
    # Else codes are asked for while others are decoded, and scales after them.
    assert plan.launches[0].constants["AHEAD"]
    assert kernels.launch(weight.operator, weight.args(x, None), (out,))
    tensors = {"scales": scales, "codes": codes, "x": x}  # not the shares' sums
    order = [name for at, size in loads for name, t in tensors.items() if within(at, size, t)]
    steps = 1024 // 128
    assert order == ["scales", "codes", "x"] * steps
