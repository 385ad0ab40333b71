"""Building blocks: the linear layer that olq quantizes, the norm, the rotary embedding, the KV cache.

Letters   B = sequences, T = tokens of this call, H = query heads, G = key/value heads, D = head_dim.

`Linear` is the only place of this engine that meets a quantization method, and `QuantMethod` does all of it:
memory for the weight, what a loader's copies into it become, and the product in the forward.
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

import olq


class Linear(nn.Module):
    """`x @ weight.T`, where the weight is one matrix made of the named parts, stacked along its rows.

    Args:
        in_features: columns of the weight.
        parts: rows of each part by its checkpoint name, such as {"q_proj": 576, "k_proj": 192, ...}.
        label: full path of this layer, by which the configuration chooses a method.
        quant: decides which layer gets which method.
        dtype: of the load format, and of the results.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], *, label: str, quant: olq.Resolver, dtype: torch.dtype
    ) -> None:
        super().__init__()
        rows = tuple(parts.values())
        starts = accumulate(rows, initial=0)
        self.rows_of = {part: (start, parts[part]) for part, start in zip(parts, starts, strict=False)}
        decision = quant.decide(label, part_names=tuple(parts) if len(parts) > 1 else ())
        self.quant_method = olq.get_method(decision.method, **decision.params)
        self.quant_method.create_weights(
            self,
            in_features=in_features,
            out_features=rows,
            dtype=dtype,
            weight_loader=self.weight_loader,
            label=label,
            reason=decision.reason,
        )

    def weight_loader(self, param: Tensor, loaded: Tensor, part: str) -> None:
        """Copy one part, as the checkpoint holds it, to its rows of the stacked weight."""
        start, rows = self.rows_of[part]
        copy_exactly(param.narrow(0, start, rows), loaded, part)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., sum of the parts' rows]."""
        return self.quant_method.apply(self, x, None)


def copy_exactly(target: Tensor, loaded: Tensor, part: str) -> None:
    """Load what is one checkpoint tensor; unlike `copy_`, never by broadcasting."""
    if target.shape != loaded.shape:
        found, need = list(loaded.shape), list(target.shape)
        raise ValueError(f"{part} is {found} in the checkpoint, {need} in the model")
    target.copy_(loaded)


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, in float32, then scale."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


def rotary_table(head_dim: int, positions: int, *, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [positions, head_dim] in float32, the second half repeating the first."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of a head by the angle of its position."""
    low, high = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat((-high, low), dim=-1) * sin_TD


class KVCache:
    """Keys and values of the tokens so far, for every layer, in memory that is taken once.

    Args:
        layers: number of decoder layers.
        shape: (B, G, longest sequence, D).
        dtype: of keys and values.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int], *, dtype: torch.dtype) -> None:
        self.keys = torch.empty(layers, *shape, dtype=dtype)
        self.values = torch.empty(layers, *shape, dtype=dtype)
        self.length = 0

    def extend(self, layer: int, keys_BGTD: Tensor, values_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store this call's tokens behind the earlier ones; all of them so far come back as views.

        `length` moves only when the model has run all layers, in `advance`.
        """
        end = self.length + keys_BGTD.shape[2]
        if end > self.keys.shape[3]:
            raise ValueError(f"the KV cache holds {self.keys.shape[3]} tokens, this call needs {end}")
        self.keys[layer, :, :, self.length : end] = keys_BGTD
        self.values[layer, :, :, self.length : end] = values_BGTD
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the tokens of a finished call."""
        self.length += tokens
