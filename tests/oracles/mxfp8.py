"""MXFP8 by the words of docs/formats/mxfp8.md: NumPy, loops over blocks, exact steps; nothing of olq."""

import math

import ml_dtypes
import numpy as np


def exponent(amax: float, rule: str) -> int:
    """The exponent of a finite positive block's scale, each rule by its own words, in exact steps."""
    if rule == "RCEIL":
        e = -127
        while amax > 448 * 2.0**e:
            e += 1
        return e
    fraction, up = math.frexp(amax)  # amax = fraction * 2 ** up, 0.5 <= fraction < 1
    if rule == "FLOOR":
        e = up - 1 - 8
    elif rule == "CEIL":
        e = (up - 1 if fraction == 0.5 else up) - 8
    elif rule == "EVEN":
        rounded = round(math.ldexp(fraction, 4))  # four significant bits, half to even
        e = (up - 1 if rounded < 16 else up) - 8
    else:
        raise ValueError(rule)
    return min(max(e, -127), 127)


def quantize(x: np.ndarray, rule: str = "RCEIL") -> tuple[np.ndarray, np.ndarray]:
    """[n, k] float32 to codes uint8 [n, k] and E8M0 bytes uint8 [n, ceil(k / 32)]."""
    n, k = x.shape
    codes = np.zeros((n, k), np.uint8)
    scales = np.zeros((n, -(-k // 32)), np.uint8)
    for i, j in np.ndindex(scales.shape):
        where = i, slice(32 * j, min(32 * j + 32, k))
        block = x[where].astype(np.float64)
        amax = float(np.abs(block).max())
        if not math.isfinite(amax):
            scales[i, j] = 255
            continue
        e = exponent(amax, rule) if amax else -127
        scales[i, j] = e + 127
        product = np.clip(block * 2.0**-e, -448, 448)  # exact: a power of two, in float64
        codes[where] = product.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes and bytes to float32: exact, infinite only beyond float32's range."""
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = np.array([math.nan if b == 255 else 2.0 ** (b - 127) for b in range(256)])
    with np.errstate(all="ignore"):
        return (values * np.repeat(factor[scales], 32, axis=1)[:, : codes.shape[1]]).astype(np.float32)
