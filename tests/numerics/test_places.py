"""Codes and scale bytes land where they are told to, in views of any strides, and nowhere else."""

import numpy as np
import pytest
import torch

from numerics import cases
from oracles import nvfp4 as oracle

OPS = torch.ops.olq


def awkward(*shape):
    g = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=g).mul_(torch.logspace(-4, 4, shape[-1])).bfloat16()


BLOCKS = {"mxfp8": 32, "nvfp4": 16}


def quantize(fmt, w, codes, scale, layout, row, row_step, column):
    if fmt == "mxfp8":
        OPS.quantize_mxfp8_(w, codes, scale, "RCEIL", layout, row, row_step, column)
    else:
        scale_2 = torch.full(w.shape[:-2], 1e-3)
        OPS.quantize_nvfp4_(w, codes, scale, scale_2, layout, row, row_step, column)


def dequantize(fmt, w, codes, scale, layout, row, row_step, column):
    out = cases.poison(*w.shape, dtype=torch.float32)
    if fmt == "mxfp8":
        OPS.dequantize_mxfp8_(codes, scale, out, layout, row, row_step, column)
    else:
        scale_2 = torch.full(w.shape[:-2], 1e-3)
        OPS.dequantize_nvfp4_(codes, scale, scale_2, out, layout, row, row_step, column)
    return out


def plain(fmt, w):
    """Codes and scales of `w` alone, row-major, from the first row and column on."""
    if fmt == "mxfp8":
        return cases.run_mxfp8(w)
    return cases.run_nvfp4(w, scale_2=torch.full(w.shape[:-2], 1e-3))[:2]


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("place", [(0, 1, 0), (3, 1, 2), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("shape", [(5, 70), (150, 96), (2, 3, 40)], ids=str)
def test_scale_bytes_land_in_their_places_and_padding_is_not_touched(fmt, shape, layout, place):
    row, row_step, column = place
    w = awkward(*shape)
    codes, bytes_ = plain(fmt, w)
    *lead, n, blocks = bytes_.shape
    rows = -(-(row + n * row_step + 1) // 128) * 128
    columns = -(-(column + blocks + 1) // 4) * 4
    scale, got_codes = cases.poison(*lead, rows, columns), cases.poison(*codes.shape)
    quantize(fmt, w, got_codes, scale, layout, row, row_step, column)

    want = np.full((int(np.prod(lead)), rows * columns), cases.POISON, np.uint8)
    for m, matrix in enumerate(bytes_.reshape(-1, n, blocks).numpy()):
        for i, j in np.ndindex(n, blocks):
            r, c = row + i * row_step, column + j
            at = r * columns + c if layout == "linear" else oracle.swizzled_offset(r, c, columns)
            want[m, at] = matrix[i, j]
    cases.assert_bytes_equal(scale.view(-1, rows * columns), want, "scales")
    cases.assert_bytes_equal(got_codes, codes, "codes")

    back = dequantize(fmt, w, got_codes, scale, layout, row, row_step, column)
    alone = dequantize(fmt, w, codes, bytes_, "linear", 0, 1, 0)
    cases.assert_bytes_equal(back, alone, "decoded")


VIEWS = {
    "rows with padding": ((6, 64), lambda storage, width: storage[:, :width]),
    "every second row": ((13, 50), lambda storage, width: storage[1::2, :width]),
    "transposed": ((50, 6), lambda storage, width: storage[:width].t()),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", cases.METHODS)
def test_codes_may_be_a_view_with_steps(name, view, monkeypatch):
    w, run = awkward(6, 50), cases.METHODS[name][0]
    want = run(w)[0]
    shape, part_of = VIEWS[view]
    storage, expected = cases.poison(*shape), cases.poison(*shape)
    target = part_of(storage, want.shape[-1])
    made = cases.poison
    # The codes are the first thing that `run` makes.
    handed_out = iter([target])
    monkeypatch.setattr(cases, "poison", lambda *s, **o: next(handed_out, made(*s, **o)))
    run(w)
    part_of(expected, want.shape[-1]).copy_(want)
    cases.assert_bytes_equal(storage, expected, "the view and the rest of its storage")


def test_fp8_scales_may_be_a_view_with_steps():
    w = awkward(6, 50)
    _, want = cases.run_fp8(w, (1, 0))
    storage = torch.full((12, 3), 5.0)
    OPS.quantize_fp8_(w, cases.poison(6, 50), storage[::2, 1:2], 1, 0, False)
    cases.assert_bytes_equal(storage[::2, 1:2], want, "scales")
    assert (storage[1::2] == 5).all()
    assert (storage[:, [0, 2]] == 5).all()


@pytest.mark.parametrize("k", [1, 15, 17, 33])
def test_an_odd_last_nvfp4_column_leaves_the_high_nibble_zero(k):
    codes, _, _ = cases.run_nvfp4(awkward(3, k))
    assert codes.shape == (3, (k + 1) // 2)
    assert (codes[:, -1] < 16).all()
