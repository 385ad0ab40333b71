"""What a forward stands for, in NumPy float64, from values that the format oracles give; imports nothing of olq.

Every operand is code * scale, exactly, in float64; so is every product, and sums are float64. Bounds are stated as

    |y - exact| <= each * S + u * |exact|,   S = sum over k of |x[m, k] * w[n, k]|

with `each` from how sums are accumulated, and u the unit roundoff of the output's dtype.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from oracles import fp8, mxfp8, nvfp4

UNITS = {"tensor": (0, 0), "token": (1, 0), "group": (1, 128)}
BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128)}
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}


def expand(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """One scale for each element, float64; block 0 is the whole extent."""
    rows, columns = (block[0] or max(shape[0], 1)), (block[1] or max(shape[1], 1))
    wide = np.repeat(np.repeat(scales.astype(np.float64), rows, 0), columns, 1)
    return wide[: shape[0], : shape[1]]


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3 bytes, float64."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def fp8_values(x: np.ndarray, block: tuple[int, int], power_of_two: bool = False) -> np.ndarray:
    """x [n, k] float32, quantized and decoded without rounding: float64."""
    codes, scales = fp8.quantize(x, block, power_of_two)
    return e4m3(codes) * expand(scales, x.shape, block)


def mxfp8_values(x: np.ndarray, rule: str = "RCEIL") -> np.ndarray:
    """Likewise, E8M0 bytes for 32 columns."""
    codes, scales = mxfp8.quantize(x, rule)
    return e4m3(codes) * expand(np.ldexp(1.0, scales.astype(np.int64) - 127), x.shape, (1, 32))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(packed: np.ndarray, columns: int) -> np.ndarray:
    """Values of packed E2M1 codes, low nibble first, float64."""
    both = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], 2 * packed.shape[1])
    return E2M1[both[:, :columns]]


def nvfp4_values(x: np.ndarray) -> np.ndarray:
    """Likewise, E4M3 bytes for 16 columns and a float32 scale for all of x."""
    scale_2 = nvfp4.tensor_scale(x)
    codes, scales = nvfp4.quantize(x, scale_2)
    return e2m1(codes, x.shape[1]) * expand(e4m3(scales), x.shape, (1, 16)) * np.float64(scale_2)


def weight_values(method: str, parts: Sequence[np.ndarray], params: dict[str, str]) -> np.ndarray:
    """The weight that a layer stands for, parts below each other, float64."""
    if method == "fp8":
        block = BLOCKS[params.get("granularity", "channel")]
        return np.concatenate([fp8_values(p, block, params.get("scale") == "power_of_two") for p in parts])
    if method == "mxfp8":
        return np.concatenate([mxfp8_values(p, params.get("rule", "RCEIL")) for p in parts])
    if params.get("scale_sharing") == "common":
        return nvfp4_values(np.concatenate(parts))
    return np.concatenate([nvfp4_values(p) for p in parts])


def input_values(method: str, x: np.ndarray, params: dict[str, str]) -> np.ndarray:
    """The input that is multiplied: x itself, or what it is quantized to."""
    activations = params.get("activations", "none")
    if activations == "none":
        return x.astype(np.float64)
    if method == "fp8":
        return fp8_values(x, UNITS[activations], params.get("scale") == "power_of_two")
    return mxfp8_values(x, params.get("rule", "RCEIL")) if method == "mxfp8" else nvfp4_values(x)


def product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(exact, S), both [M, N]; the bias counts in S."""
    exact, magnitude = x @ w.T, np.abs(x) @ np.abs(w).T
    if bias is not None:
        exact, magnitude = exact + bias, magnitude + np.abs(bias)
    return exact, magnitude


def worst(
    y: np.ndarray,
    exact: np.ndarray,
    magnitude: np.ndarray,
    each: float,
    dtype: str,
    bias: np.ndarray | None = None,
) -> float:
    """The largest error over its bound; at most 1 is right. With a bias the product may be rounded before."""
    before = 0 if bias is None else np.abs(exact - bias)
    bound = each * magnitude + ROUNDOFF[dtype] * (np.abs(exact) + before + 2 * each * magnitude) + 2.0**-24
    error = np.abs(y.astype(np.float64) - exact)
    return float(np.nan_to_num(error / bound, nan=np.inf).max(initial=0.0))


def sums(k: int, dtype: str = "float32") -> float:
    """`each` for K products and sums in a dtype, in any order, with operands rounded to it once and a bias."""
    u = ROUNDOFF[dtype]
    return (k + 4) * u / (1 - (k + 4) * u)
