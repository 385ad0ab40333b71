"""What a weight's elements are before they are quantized, by the words of docs/formats/; nothing of olq.

A weight is given as a NumPy array of float16, ml_dtypes.bfloat16, float32 or float64; the result is float32.
"""

import ml_dtypes
import numpy as np

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LARGEST = {"bfloat16": 255 * 2.0**120, "float16": 65504.0, "float32": (2 - 2**-23) * 2.0**127}


def read(w: np.ndarray, through: str | None, saturate: bool) -> np.ndarray:
    """To float32, through the parameter's dtype, and non-finite values made finite if asked to."""
    with np.errstate(all="ignore"):
        x = w.astype(np.float32)
        if through in NARROW:
            x = x.astype(NARROW[through]).astype(np.float32)
    if saturate:
        name = through or w.dtype.name
        most = np.float32(LARGEST.get(name, LARGEST["float32"]))
        x = np.where(np.isnan(x), np.float32(0), x)
        x = np.where(x == np.inf, most, x)
        x = np.where(x == -np.inf, -most, x)
    return x
