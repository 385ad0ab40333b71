"""A fused layer with shard ids beside a norm, what it loads, and the bytes that it then has to hold."""

import torch
from torch import Tensor, nn

import olq
from reload.engine_layers import weight
from reload.small_models import as_bytes


class Fused(nn.Module):
    """A fused layer with shard ids, a norm, and a loop of its own; it counts what its loaders do."""

    def __init__(self, method: str = "fp8", **params: str) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.quant_method = olq.get_method(method, **params)
        self.quant_method.create_weights(
            self, 64, (48, 16, 16), dtype=torch.bfloat16, weight_loader=self.load_shard
        )
        self.norm = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)

    def load_shard(self, parameter: Tensor, tensor: Tensor, shard: str) -> None:
        """Copy one shard into its rows."""
        self.calls.append(shard)
        start, rows = {"q": (0, 48), "k": (48, 16), "v": (64, 16)}[shard]
        parameter.narrow(0, start, rows).copy_(tensor)

    def load_weights(self, weights) -> None:
        """Names are q, k, v and norm."""
        for name, tensor in weights:
            if name == "norm":
                self.calls.append(name)
                self.norm.copy_(tensor)
            else:
                self.weight.weight_loader(self.weight, tensor, name)


def sources(seed: int) -> dict[str, Tensor]:
    """What `Fused` loads."""
    shapes = {"q": (48, 64), "norm": (64,), "k": (16, 64), "v": (16, 64)}
    return {name: weight(*shape, seed=4 * seed + i) for i, (name, shape) in enumerate(shapes.items())}


def feed(session: olq.Session, weights: dict[str, Tensor]) -> None:
    """Feed all of `weights` by parameter names and shard ids."""
    for name, tensor in weights.items():
        session.feed(*(("norm", tensor) if name == "norm" else ("weight", tensor, name)))


def cold(weights: dict[str, Tensor], method: str = "fp8", **params: str) -> dict[str, bytes]:
    """The bytes of a first load."""
    model = Fused(method, **params)
    olq.load(model, iter(weights.items()))
    return as_bytes(model)


def recorded(method: str = "fp8", **params: str) -> Fused:
    """A live `Fused` with plans of both ways to load it."""
    model = Fused(method, **params)
    olq.load(model, iter(sources(1).items()))
    with olq.session(model) as session:
        feed(session, sources(1))
    return model
