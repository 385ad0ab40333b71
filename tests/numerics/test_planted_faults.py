"""Faults planted in the reference, one at a time: the comparison with the oracle catches each.

A comparison that passes on a broken quantizer proves nothing. The inputs are those of the other files, thinned.
"""

import functools

import numpy as np
import pytest
import torch

from numerics import cases
from numerics.test_boundaries import boundaries, placed
from olq import formats
from olq.numerics import chunks, fp8, mxfp8, nvfp4, places, rounding, scales


@functools.cache
def corpus() -> tuple[torch.Tensor, ...]:
    """Matrices of all methods: every boundary, every kind of bfloat16, ragged ends, zeros of both signs."""
    zeros = torch.zeros(3, 40)
    zeros[1], zeros[2, ::3] = -0.0, -0.0
    normal = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    return (
        placed(boundaries(), 32, 7)[::3],
        cases.largest_of_their_blocks(16)[::61, None, :],
        zeros,
        normal.bfloat16(),
        normal.double() * (1 + 1e-9),
        nvfp4_ties(),
    )


def nvfp4_ties() -> torch.Tensor:
    """Two matrices, s2 a power of two and not: elements on ties of E2M1, block maxima beside ties of E4M3."""
    ties = torch.tensor(
        [6.0, 0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 0.0, -0.0, 0.1, -0.1, 3.0, 1.0, -4.0, 2.0]
    )
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    maxima = torch.cat([codes, (codes[1:] + codes[:-1]) / 2]) * 6
    matrices = []
    for s2 in (torch.tensor(2.0**-10), torch.tensor(0.1) / 2688):
        beside = torch.from_numpy(cases.near((maxima * s2).numpy())).clamp(max=(2688 * s2).item())
        matrices.append(torch.cat([beside[:, None] / 6 * ties, (2688 * s2).expand(1, 16)]))
    return torch.stack(matrices)


@functools.cache
def expected(name: str, index: int) -> tuple[np.ndarray, ...]:
    return cases.METHODS[name][1](corpus()[index], **options(index))


def options(index: int) -> dict[str, object]:
    return {"through": torch.bfloat16} if index == 4 else {}


def caught(name: str) -> str | None:
    """The first difference between operator and oracle on the corpus, None without one."""
    for index, w in enumerate(corpus()):
        found = cases.difference(name, w, expected(name, index), **options(index))
        if found:
            return found
    return None


SEEN = ("fp8-tensor-f32", "fp8-channel-f32", "fp8-channel-pow2", "mxfp8-RCEIL", "mxfp8-EVEN", "nvfp4")


@pytest.mark.parametrize("name", SEEN)
def test_the_unbroken_reference_passes(name):
    assert caught(name) is None


def bump_at(name: str, last: int):
    """Move the mantissa at which a rule steps."""

    def plant(patch):
        rule = formats.EXPONENT_RULES[name]
        patch.setitem(
            formats.EXPONENT_RULES, name, formats.ExponentRule(name, last, rule.saturates, rule.meaning)
        )

    return plant


def replace(module, attribute: str, faulty):
    return lambda patch: patch.setattr(module, attribute, faulty)


def after(function, change):
    """Call the right function, then spoil its result."""
    return lambda *args, **kwargs: change(function(*args, **kwargs), *args)


def log2_bytes(amax, rule):
    """The usual float32 ceil(log2(amax / 448))."""
    e = (amax / 448).log2().ceil().clamp(-127, 127).to(torch.int32)
    e = torch.where(amax == 0, -127, e)
    return e + 127, torch.ldexp(torch.ones_like(amax), -e)


def reciprocal_scale(amax):
    s = (amax * (1 / 448)).clamp(min=2.0**-126).masked_fill(amax == 0, 1.0)
    return s, 1 / s


def encode_scale(amax):
    r = (448 / amax).clamp(max=2.0**126).masked_fill(amax == 0, 1.0)
    return 1 / r, r


def fp8_divides(patch):
    """x / s in place of x * (1 / s): the factor is s, and every product a quotient."""
    right = scales.fp8_scale

    def scale_and_divisor(amax):
        s, _ = right(amax)
        return s, s

    patch.setattr(fp8, "fp8_scale", scale_and_divisor)
    patch.setattr(torch.Tensor, "mul_", torch.Tensor.div_)


def drop_negative_zero_e4m3(x, codes, **options):
    rounding.round_to_e4m3_(x + 0.0, codes, **options)


def drop_negative_zero_e2m1(codes, *_):
    return codes.masked_fill_(codes == 8, 0)


def ties_to_zero_e2m1(magnitude, x, scratch):
    thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    code = torch.bucketize(magnitude, thresholds).to(torch.uint8)
    return (code | (torch.signbit(x) * 8).to(torch.uint8)).contiguous()


def twice_rounded_e2m1(magnitude, x, scratch):
    return rounding.round_to_e2m1_(magnitude.half().float(), x, scratch)


def least_block_scale_is_normal(amax, s2):
    code = (amax / (6 * s2)).clamp(2.0**-6, 448).to(torch.float8_e4m3fn)
    return code.view(torch.uint8), 1 / (code.float() * s2)


def two_divisions(amax, s2):
    code = ((amax / torch.full_like(amax, 6)) / s2).clamp(max=448).to(torch.float8_e4m3fn)
    factor = 1 / (code.float() * s2)
    return code.view(torch.uint8), factor.masked_fill(factor.isinf(), 0)


def encode_order(amax, s2):
    """x * ((1 / s2) / SF), as some libraries do."""
    code, _ = scales.nvfp4_block_scale(amax, s2)
    factor = (1 / s2) / code.view(torch.float8_e4m3fn).float()
    return code, factor.masked_fill(~factor.isfinite(), 0)


def high_nibble_first(codes, packed, scratch):
    nvfp4_pack(codes, packed, scratch)
    packed.copy_(packed << 4 | packed >> 4)


nvfp4_pack = nvfp4.pack


def last_row_left_out(shape, unit, elements):
    for b in chunks.boxes(shape, unit, elements):
        if b.rows.stop == shape[-2] and shape[-2] > 1:
            b = chunks.Box(b.lead, slice(b.rows.start, b.rows.stop - 1), b.columns, b.unit, b.grid, b.whole)
            if b.rows.start == b.rows.stop:
                continue
        yield b


def ragged_end_left_out(shape, unit, elements):
    return (b for b in chunks.boxes(shape, unit, elements) if b.unit[1] in (unit[1], shape[-1]))


def through_ignored(patch):
    from olq.numerics import source

    patch.setattr(source, "_NARROW", ())


def neighbour_places(patch):
    right = places.Places.write
    patch.setattr(places.Places, "write", lambda self, index, b: right(self, index, b.roll(1, -1)))


FAULTS = {
    "mxfp8 bumps at 1.75 itself": ("mxfp8-RCEIL", bump_at("RCEIL", 0x5FFFFF)),
    "mxfp8 bumps one ulp late": ("mxfp8-RCEIL", bump_at("RCEIL", 0x600001)),
    "mxfp8 EVEN does not bump at the tie": ("mxfp8-EVEN", bump_at("EVEN", 0x780000)),
    "mxfp8 exponent by float32 log2": ("mxfp8-RCEIL", replace(mxfp8, "e8m0_scale_", log2_bytes)),
    "mxfp8 zero block gets byte 1": (
        "mxfp8-RCEIL",
        replace(mxfp8, "e8m0_scale_", after(scales.e8m0_scale_, lambda r, *_: (r[0].clamp(min=1), r[1]))),
    ),
    "mxfp8 lost -0": ("mxfp8-RCEIL", replace(mxfp8, "round_to_e4m3_", drop_negative_zero_e4m3)),
    "mxfp8 ragged end left out": ("mxfp8-RCEIL", replace(mxfp8, "boxes", ragged_end_left_out)),
    "mxfp8 bytes of the neighbour": ("mxfp8-RCEIL", neighbour_places),
    "fp8 scale by the reciprocal of 448": (
        "fp8-channel-f32",
        replace(fp8, "fp8_scale", reciprocal_scale),
    ),
    "fp8 scale through the encode scale": ("fp8-channel-f32", replace(fp8, "fp8_scale", encode_scale)),
    "fp8 divides by the scale": ("fp8-channel-f32", fp8_divides),
    "fp8 without a floor": (
        "fp8-tensor-f32",
        replace(
            fp8,
            "fp8_scale",
            lambda a: ((a / torch.full_like(a, 448)).masked_fill(a == 0, 1), scales.fp8_scale(a)[1]),
        ),
    ),
    "fp8 scale of zeros is the floor": (
        "fp8-channel-f32",
        replace(
            fp8,
            "fp8_scale",
            after(scales.fp8_scale, lambda r, a: (r[0].masked_fill(a == 0, 2.0**-126), r[1])),
        ),
    ),
    "fp8 exponent bumps at 1.75 itself": (
        "fp8-channel-pow2",
        replace(scales, "RCEIL", formats.ExponentRule("RCEIL", 0x5FFFFF, False, "")),
    ),
    "fp8 lost -0": ("fp8-channel-f32", replace(fp8, "round_to_e4m3_", drop_negative_zero_e4m3)),
    "fp8 last row left out": ("fp8-channel-f32", replace(fp8, "boxes", last_row_left_out)),
    "fp8 float64 is not rounded through the parameter": ("fp8-channel-f32", through_ignored),
    "nvfp4 ties towards zero": ("nvfp4", replace(nvfp4, "round_to_e2m1_", ties_to_zero_e2m1)),
    "nvfp4 rounds twice": ("nvfp4", replace(nvfp4, "round_to_e2m1_", twice_rounded_e2m1)),
    "nvfp4 lost -0": (
        "nvfp4",
        replace(nvfp4, "round_to_e2m1_", after(rounding.round_to_e2m1_, drop_negative_zero_e2m1)),
    ),
    "nvfp4 no subnormal block scale": (
        "nvfp4",
        replace(nvfp4, "nvfp4_block_scale", least_block_scale_is_normal),
    ),
    "nvfp4 divides twice": ("nvfp4", replace(nvfp4, "nvfp4_block_scale", two_divisions)),
    "nvfp4 factor in another order": ("nvfp4", replace(nvfp4, "nvfp4_block_scale", encode_order)),
    "nvfp4 high nibble first": ("nvfp4", replace(nvfp4, "pack", high_nibble_first)),
    "nvfp4 tensor scale of zeros is zero": (
        "nvfp4",
        replace(
            nvfp4,
            "nvfp4_tensor_scale",
            after(scales.nvfp4_tensor_scale, lambda s, a: s.masked_fill(a == 0, 0.0)),
        ),
    ),
    "nvfp4 tensor scale for 448 alone": (
        "nvfp4",
        replace(nvfp4, "nvfp4_tensor_scale", lambda a: (a / 448).masked_fill(a == 0, 1.0)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    name, plant = FAULTS[fault]
    for index in range(len(corpus())):
        expected(name, index)  # before the fault is in: torch itself may be patched
    plant(monkeypatch)
    found = caught(name)
    monkeypatch.undo()
    assert found is not None, "the comparison passed"


def test_a_fault_that_only_float32_shows():
    """Exponents by float32 log2 are right for every bfloat16 maximum: enumerating one dtype is not enough."""
    amax = cases.finite_bfloat16().float().abs()
    rule = formats.RCEIL
    normal = amax >= 448 * 2.0**-100
    assert torch.equal(log2_bytes(amax, rule)[0][normal], scales.e8m0_scale_(amax.clone(), rule)[0][normal])
    beside = boundaries()
    beside = beside[beside >= 448 * 2.0**-100]
    assert not torch.equal(log2_bytes(beside, rule)[0], scales.e8m0_scale_(beside.clone(), rule)[0])
