"""A whole weight in kernel format by the words of docs/formats: NumPy only, imports nothing of olq.

Each part is quantized alone and put where the format says; what belongs to no part holds the padding value.
"""

import numpy as np

from oracles import fp8, mxfp8, nvfp4


def up(value: int, multiple: int) -> int:
    """Round up."""
    return -(-value // multiple) * multiple


def fp8_weight(
    parts: list[np.ndarray], granularity: str, power_of_two: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of parts [n, k] float32."""
    block = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128)}[granularity]
    k = parts[0].shape[1]
    starts, end = [], 0
    for part in parts:
        starts.append(up(end, max(block[0], 1)))
        end = starts[-1] + part.shape[0]
    codes = np.zeros((up(end, 16), up(k, 16)), np.uint8)
    if granularity == "channel":
        scales = np.ones((codes.shape[0], 1), np.float32)
    else:
        scales = np.zeros(
            len(parts) if granularity == "tensor" else (up(end, 128) // 128, up(k, 128) // 128), np.float32
        )
    for i, (start, part) in enumerate(zip(starts, parts, strict=True)):
        q, s = fp8.quantize(part, block, power_of_two)
        codes[start : start + part.shape[0], :k] = q
        if granularity == "tensor":
            scales[i] = s[0, 0]
        else:
            first = start // max(block[0], 1)
            scales[first : first + s.shape[0]] = s
    return codes, scales


def swizzle(scales: np.ndarray) -> np.ndarray:
    """128x4 order, one byte at a time."""
    rows, columns = scales.shape
    out = np.zeros(up(rows, 128) * up(columns, 4), np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (up(columns, 4) // 4) + c // 4
            out[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scales[r, c]
    return out.reshape(up(rows, 128), up(columns, 4))


def _place(scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    out = np.zeros((rows, columns), np.uint8)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out


def mxfp8_weight(parts: list[np.ndarray], rule: str, swizzled: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale bytes."""
    x = np.concatenate(parts)
    n, k = x.shape
    q, s = mxfp8.quantize(x, rule)
    codes = _place(q, up(n, 16), up(k, 32))
    return codes, swizzle(s) if swizzled else _place(s, up(n, 16), up(k, 32) // 32)


def nvfp4_weight(
    parts: list[np.ndarray], swizzled: bool, common: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, block scale bytes and tensor scales."""
    parts = [np.concatenate(parts)] if common else parts
    n, k = sum(p.shape[0] for p in parts), parts[0].shape[1]
    s2 = [nvfp4.tensor_scale(part) for part in parts]
    done = [nvfp4.quantize(part, s) for part, s in zip(parts, s2, strict=True)]
    codes = _place(np.concatenate([q for q, _ in done]), up(n, 16), up(k, 32) // 2)
    s = np.concatenate([s for _, s in done])
    return codes, swizzle(s) if swizzled else _place(s, up(n, 16), up(k, 32) // 16), np.array(s2, np.float32)
