"""Vectors written down by hand, from public descriptions of the formats: neither oracle nor reference made them."""

import pytest
import torch

from numerics import cases
from olq.numerics.chunks import Scratch
from olq.numerics.rounding import powers_of_two, round_to_e2m1_, round_to_e4m3_

E4M3 = [
    (2.0**-10, 0x00),  # a tie
    (2.0**-10 * (1 + 2.0**-23), 0x01),
    (3 * 2.0**-10, 0x02),  # a tie
    (2.0**-9, 0x01),
    (2.0**-6, 0x08),
    (1.0, 0x38),
    (17.0, 0x58),  # a tie between 16 and 18
    (19.0, 0x5A),  # a tie between 18 and 20
    (448.0, 0x7E),
    (464.0, 0x7E),  # a tie between 448 and what would be 480
    (464.00003, 0x7E),  # saturates
    (1e30, 0x7E),
    (0.0, 0x00),
]


@pytest.mark.parametrize(("value", "code"), E4M3)
def test_e4m3_codes(value, code):
    codes = cases.poison(2)
    round_to_e4m3_(torch.tensor([value, -value]), codes)
    assert codes.tolist() == [code, code | 0x80]


E2M1 = [
    (0.0, 0),
    (0.25, 0),
    (0.2500001, 1),
    (0.5, 1),
    (0.7499999, 1),
    (0.75, 2),
    (1.0, 2),
    (1.25, 2),
    (1.2500001, 3),
    (1.7499999, 3),
    (1.75, 4),
    (2.0, 4),
    (2.5, 4),
    (2.5000002, 5),
    (3.4999998, 5),
    (3.5, 6),
    (4.0, 6),
    (5.0, 6),
    (5.0000005, 7),
    (6.0, 7),
    (1e30, 7),
]


@pytest.mark.parametrize(("value", "code"), E2M1)
def test_e2m1_codes(value, code):
    x = torch.tensor([value, -value])
    assert round_to_e2m1_(x.abs(), x, Scratch(2, x.device, 16)).tolist() == [code, code | 8]


MXFP8_BYTES = {  # largest of a block: FLOOR, CEIL, EVEN, RCEIL
    0.0: (0, 0, 0, 0),
    1.0: (119, 119, 119, 119),
    1.25: (119, 120, 119, 119),
    1.7421875: (119, 120, 119, 119),
    1.75: (119, 120, 119, 119),
    1.7578125: (119, 120, 119, 120),
    1.875: (119, 120, 119, 120),
    1.9375: (119, 120, 120, 120),
    2.0: (120, 120, 120, 120),
    448.0: (127, 128, 127, 127),
    2.0**-149: (0, 0, 0, 0),
}


@pytest.mark.parametrize("amax", MXFP8_BYTES)
def test_mxfp8_bytes(amax):
    w = torch.zeros(1, 32)
    w[0, 9] = -amax
    got = tuple(cases.run_mxfp8(w, rule)[1].item() for rule in ("FLOOR", "CEIL", "EVEN", "RCEIL"))
    assert got == MXFP8_BYTES[amax]


def test_mxfp8_saturates_under_floor_and_not_under_rceil():
    w = torch.zeros(1, 32)
    w[0, 0] = 1.9
    back = {}
    for rule in ("FLOOR", "RCEIL"):
        codes, scale = cases.run_mxfp8(w, rule)
        out = torch.empty(1, 32)
        torch.ops.olq.dequantize_mxfp8_(codes, scale, out, "linear", 0, 1, 0)
        back[rule] = out[0, 0].item()
    assert back == {"FLOOR": 1.75, "RCEIL": 1.875}


def test_e8m0_byte_0_is_a_subnormal_and_255_is_nan():
    values = powers_of_two(torch.tensor([0, 1, 127, 254], dtype=torch.uint8))
    assert values.tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert powers_of_two(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_fp8_of_a_small_matrix():
    w = torch.tensor([[448.0, 1.0, -17.0, 19.0], [0.0, -0.0, 0.0, 0.0]])
    codes, scale = cases.run_fp8(w, (1, 0))
    assert scale.tolist() == [[1.0], [1.0]]
    assert codes.tolist() == [[0x7E, 0x38, 0xD8, 0x5A], [0x00, 0x80, 0x00, 0x00]]


def test_nvfp4_of_a_small_matrix():
    """amax 2688: s2 is 1; the first block's SF is 448 (0x7E), the second's 1 (0x38), the third's rounds to 0."""
    w = torch.zeros(1, 48)
    w[0, 0], w[0, 1] = 2688.0, -448.0
    w[0, 16:23] = torch.tensor([6.0, -0.5, 0.25, 5.0, 3.5, -0.0, -0.1])
    w[0, 32], w[0, 33] = 0.005, -0.005
    codes, scale, scale_2 = cases.run_nvfp4(w)
    assert scale_2.item() == 1.0
    assert scale.tolist() == [[0x7E, 0x38, 0x00]]
    assert codes[0, :12].tolist() == [0xA7, 0, 0, 0, 0, 0, 0, 0, 0x97, 0x60, 0x86, 0x08]
    assert codes[0, 16:].tolist() == [0x80, 0, 0, 0, 0, 0, 0, 0]


def test_nvfp4_packs_the_even_column_low():
    w = torch.zeros(1, 16)
    w[0, :2] = torch.tensor([6.0, 1.0])
    assert cases.run_nvfp4(w, scale_2=torch.tensor(1.0))[0][0, 0].item() == 0x27
