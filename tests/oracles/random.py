"""Uniform values by the words of docs/formats/dummy.md: Python integers and NumPy, one element at a time."""

import hashlib
from collections.abc import Iterable
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np

STORED = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float64": np.float64,
}


def word(seed: int, name: str, index: int) -> int:
    """The 32-bit word of the pair `index` lies in."""
    block, pair = divmod(index // 2, 2**32)
    digest = hashlib.sha256(b"olq-uniform-1\n%d\n%d\n%s" % (seed, block, name.encode("utf-8"))).digest()
    x = (pair * 0x9E3779B9 + int.from_bytes(digest[:4], "little")) % 2**32
    x ^= x // 2**16
    x = x * 0x7FEB352D % 2**32
    x ^= x // 2**15
    x ^= int.from_bytes(digest[4:8], "little")
    x = x * 0x846CA68B % 2**32
    return x ^ x // 2**16


def draw(seed: int, name: str, index: int) -> int:
    """The signed 16-bit integer of one element."""
    half = word(seed, name, index) // (2**16 if index % 2 else 1) % 2**16
    return half - 2**16 if half >= 2**15 else half


def step(low: np.float32, high: np.float32) -> np.float32:
    """The distance of two neighbouring values: cut to eight significant bits."""
    exact = Fraction(float(high) - float(low)) / 65536
    power = Fraction(1)
    while exact and power * 128 > exact:
        power /= 2
    while exact and power * 256 <= exact:
        power *= 2
    cut = float(exact // power * power)
    return np.float32(cut if cut >= 2.0**-126 else 0)


def value(seed: int, name: str, index: int, low: float, high: float) -> np.float32:
    """One element, before it is rounded to the tensor's dtype."""
    low, high = np.float32(low), np.float32(high)
    centre = np.float32((float(low) + float(high)) / 2)
    offset = np.float32(draw(seed, name, index)) * step(low, high)
    return min(max(np.float32(centre + offset), low), high)


def box(
    seed: int,
    name: str,
    low: float,
    high: float,
    extents: Iterable[int],
    shape: Iterable[int],
    offset: Iterable[int],
    dtype: str,
) -> np.ndarray:
    """A box of the unsharded tensor: `extents` elements from `offset` on, in a tensor of `shape`."""
    extents, shape, offset = tuple(extents), tuple(shape), tuple(offset)
    out = np.zeros(extents, STORED[dtype])
    for at in product(*map(range, extents)):
        index = 0
        for i, o, size in zip(at, offset, shape, strict=True):
            index = index * size + i + o
        out[at] = STORED[dtype](value(seed, name, index, low, high))
    return out
