"""Layers with a quantized weight for tests of forwards."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

import olq

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Params = dict[str, str]


class Layer(nn.Module):
    """One weight and maybe a bias, as an engine would have them."""

    def __init__(
        self, method: str, parts: Sequence[int], columns: int, bias: Tensor | None = None, **params: str
    ) -> None:
        super().__init__()
        self.quant_method = olq.get_method(method, **params)
        self.quant_method.create_weights(self, columns, parts, dtype=torch.float32, label="layer")
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Float32 of many magnitudes: rows, and columns in 32s, differ by factors of up to 16."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape)
    x *= 2.0 ** draw.integers(-2, 3, (*shape[:-1], 1))
    x *= np.repeat(2.0 ** draw.integers(-2, 3, -(-shape[-1] // 32)), 32)[: shape[-1]]
    return x.astype(np.float32)


def rounded(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor of the dtype."""
    return torch.from_numpy(x).to(dtype)


def loaded(
    method: str, w: np.ndarray, parts: Sequence[int], bias: Tensor | None = None, **params: str
) -> Layer:
    """A live layer with the weight w, float32."""
    layer = Layer(method, parts, w.shape[1], bias, **params)
    olq.load(layer, {"weight": torch.from_numpy(w)} | ({} if bias is None else {"bias": bias}))
    return layer


def split(w: np.ndarray, parts: Sequence[int]) -> list[np.ndarray]:
    """The parts of a weight."""
    return np.split(w, np.cumsum(parts)[:-1]) if len(parts) else []
