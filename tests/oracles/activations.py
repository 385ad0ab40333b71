"""Activations by the words of docs/formats/activations.md: NumPy, named float32 steps; nothing of olq."""

import ml_dtypes
import numpy as np

from oracles import fp8

F = np.float32
LOG2_E = F(1.44269502162933349609375)
LN2_HIGH = F(0.693359375)
LN2_LOW = F(-0.00021219444170128554105758666992)
C3, C4, C5, C6 = (
    F(0.16666533052921295166015625),
    F(0.04166722670197486877441406),
    F(0.00836759060621261596679688),
    F(0.00138649146538227796554565),
)


def exp_of_minus(a: np.ndarray) -> np.ndarray:
    """exp(-a) for 0 <= a <= 87."""
    k = np.rint(a * LOG2_E)
    s = (k * LN2_HIGH - a) + k * LN2_LOW
    p = C6 * s + C5
    p = p * s + C4
    p = p * s + C3
    p = p * s + F(0.5)
    p = p * s + F(1)
    p = p * s + F(1)
    assert p.dtype == np.float32
    return np.ldexp(p, -np.where(np.isnan(k), 0, k).astype(np.int32))


def sigmoid(t: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-t)), 0 below -87."""
    e = exp_of_minus(np.minimum(np.abs(t), F(87)))
    numerator = np.where(t >= 0, F(1), e)
    return np.where(t < F(-87), F(0), numerator / (F(1) + e))


def silu_mul(
    gate: np.ndarray,
    up: np.ndarray,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: str | None = None,
) -> np.ndarray:
    """y in float32; gate and up in any type."""
    with np.errstate(all="ignore"):
        g, u = gate.astype(F), up.astype(F)
        if limit is not None:
            g = np.minimum(g, F(limit))
            u = np.maximum(np.minimum(u, F(limit)), -F(limit))
        gated = g * sigmoid(F(alpha) * g)
        y = gated * (u + F(beta)) if beta else gated * u
        if through == "bfloat16":
            y = y.astype(ml_dtypes.bfloat16).astype(F)
        if through == "float16":
            y = y.astype(np.float16).astype(F)
    assert y.dtype == np.float32
    return y


def exponents(scales: np.ndarray) -> np.ndarray:
    """Bytes of power-of-two scales; NaN is 255."""
    fraction, up = np.frexp(scales)
    assert np.isnan(scales).sum() + (fraction == 0.5).sum() == scales.size
    return np.where(np.isnan(scales), 255, up - 1 + 127).astype(np.uint8)


def words(bytes_: np.ndarray) -> np.ndarray:
    """[M, G] exponents to int32 [M, W]."""
    M, G = bytes_.shape
    out = np.zeros((M, -(-G // 4)), np.int64)
    for m, g in np.ndindex(M, G):
        out[m, g // 4] += int(bytes_[m, g]) << 8 * (g % 4)
    return out.astype(np.uint32).view(np.int32)


def column_storage(scale: np.ndarray, padding: float) -> np.ndarray:
    """All elements of one matrix's storage, column by column, rows up to a multiple of 4."""
    M, columns = scale.shape
    out = np.full((columns, -(-M // 4) * 4), padding, scale.dtype)
    out[:, :M] = scale.T
    return out.reshape(-1)


def swizzled_storage(bytes_: np.ndarray) -> np.ndarray:
    """All bytes of one matrix's block scales in 128x4 order."""
    R, C = bytes_.shape
    tiles = -(-C // 4)
    out = np.zeros(-(-R // 128) * tiles * 512, np.uint8)
    for r, c in np.ndindex(R, C):
        tile = (r // 128) * tiles + c // 4
        out[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = bytes_[r, c]
    return out


def quantize_groups(y: np.ndarray, group: int, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """[M, K] float32 to codes [M, K] and decode scales [M, G]."""
    codes, scales = fp8.quantize(y, (1, group), power_of_two)
    groups = -(-y.shape[1] // group)
    return codes, scales[: y.shape[0], :groups]
