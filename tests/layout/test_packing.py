"""The tensor forms put each element where the integer maps say, padding included, in the caller's storage."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olq.alloc import TensorSpec, allocate
from olq.errors import LayoutError
from olq.layout import MNMajor, Nibbles, Order, Swizzle128x4, UE8M0Words
from olq.numerics.packing import (
    decode_e8m0,
    from_mn_major,
    from_ue8m0_words,
    pack_nibbles,
    to_mn_major,
    to_ue8m0_words,
    unpack_nibbles,
)
from olq.numerics.swizzle import flat_index, swizzle_128x4, unswizzle_128x4

STALE = 0xA5
ROWS = st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 127, 128, 129, 200, 257]))
COLUMNS = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17]))
LEADS = st.sampled_from([(), (), (1,), (3,), (2, 2), (0,)])


def draw_bytes(shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def awkward(t: Tensor, how: str) -> Tensor:
    """The same values behind other strides."""
    if how == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "every other":
        wide = torch.full((*t.shape[:-1], t.shape[-1] * 2), 77, dtype=torch.uint8).to(t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    return t


STRIDES = st.sampled_from(["contiguous", "transposed", "every other"])


def by_the_map(order: Order, matrix: np.ndarray) -> np.ndarray:
    """Storage of one matrix in the order's units, element by element."""
    storage = np.full(order.extent, order.padding_value, matrix.dtype)
    for row, column in product(range(order.rows), range(order.columns)):
        storage[order.offset(row, column)] = matrix[row, column]
    return storage


def storage_of(t: Tensor) -> np.ndarray:
    """All bytes from the tensor's first element to the end of its storage."""
    start = t.storage_offset() * t.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    return whole[start:].numpy()


# 128x4


@given(ROWS, COLUMNS, LEADS, STRIDES, st.booleans(), st.integers(0, 99))
def test_swizzle_follows_the_map_and_comes_back(rows, columns, lead, how, own_storage, seed):
    linear = awkward(draw_bytes((*lead, rows, columns), seed), how)
    order = Swizzle128x4(rows, columns)
    out = torch.full((*lead, *order.shape), STALE, dtype=torch.uint8) if own_storage else None
    swizzled = swizzle_128x4(linear, out)
    assert out is None or swizzled is out
    assert tuple(swizzled.shape) == (*lead, *order.shape)
    each = linear.reshape(prod(lead), rows, columns).numpy()
    expected = np.concatenate([by_the_map(order, matrix) for matrix in each] or [np.empty(0, np.uint8)])
    np.testing.assert_array_equal(swizzled.numpy().ravel(), expected)
    assert torch.equal(unswizzle_128x4(swizzled, rows, columns), linear)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 4), (128, 8), (200, 7), (384, 3)])
def test_swizzle_equals_pad_cut_and_transpose(rows, columns):
    """The field's own way to say it: pad, cut into [tile, quarter, row, tile, column], reorder."""
    linear = draw_bytes((rows, columns), 1).numpy()
    padded = np.pad(linear, ((0, -rows % 128), (0, -columns % 4)))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
    np.testing.assert_array_equal(swizzle_128x4(torch.from_numpy(linear)).numpy().ravel(), tiles.ravel())


@given(st.integers(1, 300), st.integers(1, 20))
def test_flat_index_is_the_map_vectorised(rows, columns):
    order = Swizzle128x4(rows, columns)
    index = flat_index(torch.arange(rows, dtype=torch.int32)[:, None], torch.arange(columns), columns)
    assert index.dtype == torch.int64
    assert index.tolist() == [[order.offset(r, c) for c in range(columns)] for r in range(rows)]


def test_unswizzle_writes_into_a_strided_view_and_touches_nothing_else():
    linear = draw_bytes((130, 5), 2)
    wide = torch.full((130, 12), STALE, dtype=torch.uint8)
    unswizzle_128x4(swizzle_128x4(linear), 130, 5, out=wide[:, 1:11:2])
    assert torch.equal(wide[:, 1:11:2], linear)
    wide[:, 1:11:2] = STALE
    assert (wide == STALE).all()


# nibbles


def test_the_low_nibble_comes_first():
    codes = torch.tensor([[1, 2, 3, 4, 5], [15, 0, 0, 15, 9]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x43, 0x05], [0x0F, 0xF0, 0x09]]


@given(ROWS, COLUMNS, LEADS, STRIDES, st.booleans(), st.integers(0, 99))
def test_nibbles_follow_the_map_and_come_back(rows, columns, lead, how, strided_out, seed):
    codes = awkward(draw_bytes((*lead, rows, columns), seed, high=16), how)
    order = Nibbles(rows, columns)
    out = None
    if strided_out:
        out = torch.full((*lead, rows, order.shape[1] * 3), STALE, dtype=torch.uint8)[..., ::3]
    packed = pack_nibbles(codes, out)
    units = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).ravel()
    each = codes.reshape(prod(lead), rows, columns).numpy()
    expected = np.concatenate([by_the_map(order, matrix) for matrix in each] or [np.empty(0, np.uint8)])
    np.testing.assert_array_equal(units, expected)
    assert torch.equal(unpack_nibbles(packed, columns), codes)
    back = torch.full((*lead, rows, columns * 2), STALE, dtype=torch.uint8)[..., ::2]
    assert torch.equal(unpack_nibbles(packed, columns, back), codes)


def test_bits_above_a_code_are_dropped():
    assert pack_nibbles(torch.tensor([0x91, 0xF2, 0xA3], dtype=torch.uint8)).tolist() == [0x21, 0x03]


# MN-major


@given(ROWS, COLUMNS, LEADS, STRIDES, st.integers(0, 99))
def test_mn_major_follows_the_map_and_comes_back(rows, columns, lead, how, seed):
    scale = awkward(draw_bytes((*lead, rows, columns), seed, low=1).float(), how)
    order = MNMajor(rows, columns)
    out = to_mn_major(scale)
    assert (tuple(out.shape), out.stride()[-2:]) == ((*lead, rows, columns), order.strides)
    each = scale.reshape(prod(lead), rows, columns).numpy()
    expected = np.concatenate([by_the_map(order, matrix) for matrix in each] or [np.empty(0, np.float32)])
    np.testing.assert_array_equal(storage_of(out).view(np.float32), expected)
    back = from_mn_major(out)
    assert back.is_contiguous()
    assert torch.equal(back, scale)


def test_mn_major_fills_the_callers_storage():
    out = allocate(TensorSpec.of(MNMajor(7, 32), torch.float32), device="cpu", owner="test")
    scale = torch.rand(7, 32)
    assert to_mn_major(scale, out) is out
    assert torch.equal(out, scale)
    with pytest.raises(LayoutError, match=r"strides \[32, 1\]\n  need:   torch.float32, .*strides \[1, 8\]"):
        to_mn_major(scale, torch.empty(7, 32))


# UE8M0 words


@given(ROWS, COLUMNS, LEADS, STRIDES, st.booleans(), st.integers(0, 99))
def test_words_follow_the_map_and_come_back(rows, columns, lead, how, from_bytes, seed):
    exponents = draw_bytes((*lead, rows, columns), seed, high=255)
    scale = awkward(exponents if from_bytes else decode_e8m0(exponents), how)
    order = UE8M0Words(rows, columns)
    words = to_ue8m0_words(scale)
    assert (tuple(words.shape), words.stride()[-2:]) == ((*lead, *order.shape), order.strides)
    each = exponents.reshape(prod(lead), rows, columns).numpy()
    expected = np.concatenate([by_the_map(order, matrix) for matrix in each] or [np.empty(0, np.uint8)])
    np.testing.assert_array_equal(storage_of(words), expected)
    assert torch.equal(from_ue8m0_words(words, columns), decode_e8m0(exponents))
    back = from_ue8m0_words(words, columns, torch.empty((*lead, rows, columns), dtype=torch.uint8))
    assert torch.equal(back, exponents)


def test_four_exponents_are_one_little_endian_word():
    scale = torch.tensor([[2.0**-127, 1.0, 2.0, 2.0**127, 4.0]])
    words = to_ue8m0_words(scale)
    assert words.tolist() == [[int.from_bytes(bytes([0, 127, 128, 254]), "little", signed=True), 129]]
    assert words.dtype == torch.int32


def test_every_exponent_byte_decodes_as_the_format_says():
    decoded = decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert decoded[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert decoded[255].isnan()
    assert torch.equal(from_ue8m0_words(to_ue8m0_words(decoded[None, :255]), 255), decoded[None, :255])


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 300])
def test_rows_of_a_block_repeat_its_scale(rows):
    blocks = -(-rows // 128)
    scale = decode_e8m0(draw_bytes((blocks, 5), 3, high=255))
    by_row = scale[torch.arange(rows) // 128]
    words = to_ue8m0_words(scale, rows=rows, block_rows=128)
    assert torch.equal(from_ue8m0_words(words, 5), by_row)
    assert torch.equal(words, to_ue8m0_words(by_row))


# Powers of two that E8M0 lacks, and what is no power of two at all.
REFUSED = [0.0, -0.0, -1.0, 3.0, 1.0000001, 2.0**-128, 2.0**-149, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("value", REFUSED)
def test_a_scale_without_an_exponent_byte_is_refused(value):
    scale = torch.ones(3, 5)
    scale[1, 4] = value
    with pytest.raises(LayoutError) as caught:
        to_ue8m0_words(scale)
    found = scale[1, 4].item()
    assert str(caught.value) == (
        "A scale is not a positive power of two, so it has no exponent byte.\n"
        "  where:  to_ue8m0_words, scale [1, 4]\n"
        f"  found:  {found!r}; 1 of 15 scales are like that\n"
        "  need:   2.0**n with -127 <= n <= 127\n"
        "  remedy: quantize with power-of-two scales, or keep the scales in float32"
    )


def test_every_float32_exponent_and_a_set_bit_of_every_mantissa_is_judged_right():
    exponents = torch.arange(256, dtype=torch.int32)
    for mantissa in (0, *(1 << bit for bit in range(23))):
        bits = (exponents << 23) | mantissa
        values = bits.view(torch.float32)
        legal = (mantissa == 0) & (exponents > 0) & (exponents < 255) | (bits == 0x00400000)
        to_ue8m0_words(values[None, legal])
        for value in values[~legal][:: 1 if mantissa in (0, 1 << 22) else 64]:
            with pytest.raises(LayoutError, match="positive power of two"):
                to_ue8m0_words(value.reshape(1, 1))


def test_the_nan_byte_is_refused_in_bytes_too():
    with pytest.raises(LayoutError, match=r"255; 1 of 2 scales .*\n  need:   bytes 0..254; 255 is NaN"):
        to_ue8m0_words(torch.tensor([[255, 3]], dtype=torch.uint8))


# messages


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_nibbles(torch.zeros(2, 4)), r"pack_nibbles\n  found:  torch.float32"),
        (lambda: unpack_nibbles(torch.zeros(2, 4, dtype=torch.uint8), 5), r"\[..., 3\] uint8 for 5 codes"),
        (lambda: from_ue8m0_words(torch.zeros(2, 4, dtype=torch.int32), 3), r"\[..., 1\] int32 for 3 groups"),
        (
            lambda: to_ue8m0_words(torch.ones(2, 4), rows=300, block_rows=128),
            r"3 rows of scales for 300 rows",
        ),
        (lambda: swizzle_128x4(torch.zeros(2, 4)), r"uint8, \[\*lead, rows, columns\]"),
        (
            lambda: swizzle_128x4(*(torch.zeros(2, 4, dtype=torch.uint8),) * 2),
            r"need:   uint8, shape \[128, 4\], contiguous",
        ),
        (lambda: unswizzle_128x4(torch.zeros(128, 4, dtype=torch.uint8), 129, 4), r"shape \[256, 4\]"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(LayoutError, match=text):
        call()
