"""NVFP4 by the words of docs/formats/nvfp4.md: NumPy, loops, named float32 steps; nothing of olq."""

import ml_dtypes
import numpy as np

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
F = np.float32


def e2m1(value: float) -> int:
    """The code of one number: the nearest value, of two equally near ones the even code; the sign is kept."""
    magnitude = min(abs(value), 6.0)
    nearest = min(abs(v - magnitude) for v in VALUES)  # exact: float64 differences of float32 numbers
    code = min((c for c in range(8) if abs(VALUES[c] - magnitude) == nearest), key=lambda c: c % 2)
    return code | (8 if np.signbit(value) else 0)


def tensor_scale(x: np.ndarray) -> np.float32:
    """The decode scale of a whole matrix."""
    amax = np.abs(x).max() if x.size else F(0)
    if not np.isfinite(amax):
        return F("nan")
    if amax == 0:
        return F(1)
    return max(F(amax) / F(2688), F(2.0**-117))


def block_scale(amax: np.float32, s2: np.float32) -> tuple[int, np.float32]:
    """The E4M3 byte of a block and the factor that encodes with it."""
    if not (np.isfinite(amax) and np.isfinite(s2) and s2 > 0):
        return 0x7F, F("nan")
    six = F(6) * s2
    ratio = min(amax / six, F(448))
    sf = ratio.astype(ml_dtypes.float8_e4m3fn)
    step = sf.astype(np.float32) * s2
    factor = F(1) / step if step != 0 else F(0)
    return int(sf.view(np.uint8)), factor if np.isfinite(factor) else F(0)


def codes_of(x: np.ndarray, s2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] float32 to E2M1 codes uint8 [n, k], one a byte, and E4M3 bytes uint8 [n, ceil(k / 16)]."""
    n, k = x.shape
    codes = np.zeros((n, k), np.uint8)
    scales = np.zeros((n, -(-k // 16)), np.uint8)
    with np.errstate(all="ignore"):
        for i, j in np.ndindex(scales.shape):
            where = i, slice(16 * j, min(16 * j + 16, k))
            scales[i, j], r = block_scale(np.abs(x[where]).max(), F(s2))
            if not np.isnan(r):
                product = x[where] * r
                assert product.dtype == np.float32
                codes[where] = cast(product)
    return codes, scales


def cast(product: np.ndarray) -> np.ndarray:
    """E2M1 codes of float32 numbers. ml_dtypes rounds; a test compares it with `e2m1`."""
    clipped = np.clip(product, F(-6), F(6))
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte: the even column in the low nibble, a missing last one 0."""
    n, k = codes.shape
    out = np.zeros((n, -(-k // 2)), np.uint8)
    for j in range(k):
        out[:, j // 2] |= codes[:, j] << (4 * (j % 2))
    return out


def quantize(x: np.ndarray, s2: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """[n, k] float32 to packed codes uint8 [n, ceil(k / 2)] and E4M3 bytes uint8 [n, ceil(k / 16)]."""
    codes, scales = codes_of(x, s2)
    return pack(codes), scales


def dequantize(packed: np.ndarray, scales: np.ndarray, s2: np.float32, k: int) -> np.ndarray:
    """Packed codes to float32 [n, k]: (code * SF) * s2, two float32 products."""
    out = np.empty((packed.shape[0], k), np.float32)
    with np.errstate(all="ignore"):
        for i, j in np.ndindex(out.shape):
            nibble = int(packed[i, j // 2]) >> (4 * (j % 2)) & 0xF
            value = F(-VALUES[nibble & 7] if nibble & 8 else VALUES[nibble])
            sf = scales[i, j // 16 : j // 16 + 1].view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0]
            out[i, j] = (value * sf) * F(s2)
    return out


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Where scale byte (row, column) of a matrix with `columns` scale columns lies in 128x4 order."""
    tile = (row // 128) * (-(-columns // 4)) + column // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
