"""Dummy values in one pass, without scratch: rule `olq-uniform-1`, as olq.numerics.random has it. Imports triton.

A box of a tensor is (batches,) rows x run: neighbours along the run are neighbours in the index, so that two share a
word. An element costs two or three instructions beside its half of a word: what limits the kernel is memory.
"""

import triton
import triton.language as tl

from olq.kernels.rounding import e4m3


@triton.jit
def _mix(word, key_0, key_1):
    """w of olq.numerics.random, uint32."""
    x = word * 0x9E3779B9 + key_0
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ key_1
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _integers(w, HARDWARE: tl.constexpr):
    """Float32 2**23 + t + 2**15 of both draws t of a word: there float32 are 1 apart, and low bits count.

    Cheaper than a conversion of integers. HARDWARE: by moving bytes.
    """
    # A draw is signed: 2**15 is added by turning its first bit over.
    w = w ^ 0x80008000
    if HARDWARE:
        even, odd = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0x4B00, 0x5410; prmt.b32 $1, $2, 0x4B00, 0x5432;",
            "=r,=r,r",
            [w],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        even = (w & 0xFFFF) | 0x4B000000
        odd = (w >> 16) | 0x4B000000
    return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)


@triton.jit
def _bits(
    f,
    STEP: tl.constexpr,
    CENTRE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CLAMPS: tl.constexpr,
    FUSED: tl.constexpr,
    TYPE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The bits of values, rounded to nearest, ties to even, given `_integers`; as integers of the type's size."""
    if FUSED and HARDWARE:  # noqa: SIM108  # of constants: only one of the two is compiled
        x = tl.fma(f, STEP, -8421376.0 * STEP)  # exact: t * STEP has 24 bits, and the offset 17
    else:
        x = (f - 8421376.0) * STEP
    if CENTRE != 0.0:
        x = x + CENTRE
    if CLAMPS:
        x = tl.minimum(tl.maximum(x, LOW), HIGH)
    bits = x.to(tl.int32, bitcast=True)
    if TYPE == "float32":
        result = bits
    elif TYPE == "float16":
        result = x.to(tl.float16).to(tl.int16, bitcast=True)
    elif TYPE == "float8_e4m3fn":
        result = e4m3(x, HARDWARE)
    elif TYPE == "bfloat16":
        if HARDWARE:
            result = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        else:
            result = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif HARDWARE:
        result = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        a = bits & 0x7FFFFFFF
        normal = ((a + 0xFFFFF + ((a >> 21) & 1)) >> 21) - (112 << 2)
        # Below 2**-14 codes are 2**-16 apart, as float32 are from 1.5 * 2**7 on: one addition rounds.
        small = (a.to(tl.float32, bitcast=True) + 192.0).to(tl.int32, bitcast=True) - 0x43400000
        result = (tl.where(a < 0x38800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return result


@triton.jit(do_not_specialize=["word", "row_word", "batch_word", "group_word", "key_0", "key_1"])
def fill(
    out,
    rows,
    length,
    word,
    row_word,
    batch_word,
    group_word,
    key_0,
    key_1,
    run_stride,
    row_stride,
    batch_stride,
    group_stride,
    STEP: tl.constexpr,
    CENTRE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CLAMPS: tl.constexpr,
    FUSED: tl.constexpr,
    TYPE: tl.constexpr,
    ODD: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    LINE: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Fill rows x `length` elements of each batch and group: grid (tiles, batches, groups).

    Words count from `word`, and on by *_word with each row, batch and group; modulo 2**32. ODD: a run begins with the
    second half of a word. ACROSS: a run's neighbours are no neighbours in memory. LINE: there are no rows but a tile's.
    """
    batch = tl.program_id(1)
    group = tl.program_id(2)
    tile = tl.program_id(0)
    down = 0
    if not LINE:
        across = tl.cast((length + (ODD + 2 * PAIRS - 1)) // (2 * PAIRS), tl.int32)
        down = tile // across
        tile -= down * across
    first_row = tl.cast(down, tl.int64) * ROWS
    first = tl.cast(tile, tl.int64) * (2 * PAIRS)
    i = tl.arange(0, ROWS)
    pairs = tl.arange(0, PAIRS)

    start = tl.cast(word, tl.uint32) + tl.cast(batch, tl.uint32) * tl.cast(batch_word, tl.uint32)
    start += tl.cast(group, tl.uint32) * tl.cast(group_word, tl.uint32)
    start += tl.cast(first_row, tl.uint32) * tl.cast(row_word, tl.uint32) + tl.cast(first // 2, tl.uint32)
    words = i.to(tl.uint32)[:, None] * tl.cast(row_word, tl.uint32) + (start + pairs.to(tl.uint32))[None, :]
    w = _mix(words, tl.cast(key_0, tl.uint32), tl.cast(key_1, tl.uint32))
    even, odd = _integers(w, HARDWARE)

    out += tl.cast(batch, tl.int64) * batch_stride + tl.cast(group, tl.int64) * group_stride
    out += first_row * row_stride + (first - ODD) * run_stride
    inside = (i < rows - first_row)[:, None]
    left = length - first + ODD
    if WIDE:
        i = i.to(tl.int64)
        pairs = pairs.to(tl.int64)
    if ACROSS:
        at = out + (i[:, None] * row_stride + (2 * pairs)[None, :] * run_stride)
        mask = inside & (2 * pairs < left)[None, :]
        if ODD:
            mask = mask & (2 * pairs + first >= 1)[None, :]
        even_bits = _bits(even, STEP, CENTRE, LOW, HIGH, CLAMPS, FUSED, TYPE, HARDWARE)
        odd_bits = _bits(odd, STEP, CENTRE, LOW, HIGH, CLAMPS, FUSED, TYPE, HARDWARE)
        tl.store(at, even_bits, mask=mask)
        tl.store(at + run_stride, odd_bits, mask=inside & (2 * pairs + 1 < left)[None, :])
    else:
        # In order before they are converted: conversions take two neighbours at a time.
        both = tl.reshape(tl.join(even, odd), (ROWS, 2 * PAIRS))
        values = _bits(both, STEP, CENTRE, LOW, HIGH, CLAMPS, FUSED, TYPE, HARDWARE)
        columns = tl.arange(0, 2 * PAIRS)
        at = out + (i[:, None] * row_stride + columns[None, :])
        if FULL:
            tl.store(at, values)
        else:
            mask = inside & (columns < left)[None, :]
            if ODD:
                mask = mask & (columns + first >= 1)[None, :]
            tl.store(at, values, mask=mask)
