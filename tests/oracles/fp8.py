"""FP8 by the words of docs/formats/fp8.md: NumPy, loops over units, named float32 steps; nothing of olq."""

import ml_dtypes
import numpy as np


def unit_bounds(shape: tuple[int, int], block: tuple[int, int]) -> list[list[tuple[slice, slice]]]:
    """Row by row, where each unit lies; block 0 is the whole extent."""
    n, k = shape
    rows, columns = block[0] or max(n, 1), block[1] or max(k, 1)
    return [
        [(slice(i, min(i + rows, n)), slice(j, min(j + columns, k))) for j in range(0, max(k, 1), columns)]
        for i in range(0, max(n, 1), rows)
    ]


def decode_scale(amax: np.float32, power_of_two: bool) -> np.float32:
    """The scale of a unit whose largest magnitude is `amax`."""
    if not np.isfinite(amax):
        return np.float32("nan")
    if amax == 0:
        return np.float32(1)
    if not power_of_two:
        return max(np.float32(amax) / np.float32(448), np.float32(2.0**-126))
    exponent = -126
    while float(amax) > 448 * 2.0**exponent:  # exact in float64
        exponent += 1
    return np.float32(2.0**exponent)


def quantize(
    x: np.ndarray, block: tuple[int, int], power_of_two: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] float32 to codes uint8 [n, k] and decode scales float32, one a unit."""
    bounds = unit_bounds(x.shape, block)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((len(bounds), len(bounds[0])), np.float32)
    with np.errstate(all="ignore"):
        for i, row in enumerate(bounds):
            for j, where in enumerate(row):
                unit = x[where]
                amax = np.abs(unit).max() if unit.size else np.float32(0)
                scales[i, j] = s = decode_scale(amax, power_of_two)
                if np.isnan(s):
                    continue
                r = np.float32(1) / s
                product = np.clip(unit * r, np.float32(-448), np.float32(448))
                assert product.dtype == np.float32
                codes[where] = product.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Codes and scales to float32, one rounding an element."""
    out = np.empty(codes.shape, np.float32)
    with np.errstate(all="ignore"):
        for i, row in enumerate(unit_bounds(codes.shape, block)):
            for j, where in enumerate(row):
                out[where] = codes[where].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[i, j]
    return out
