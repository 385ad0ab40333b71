"""Law 2 for every method and every way to reload: after A then B a model is, byte for byte, one that only saw B.

Parameters, buffers and bare attributes; and it keeps every address, shape, stride, dtype and Python attribute of the
model that loaded A. Memory that `empty` returns is filled with NaN by torch.
"""

import pytest
import torch
from torch import Tensor, nn

import olq
from reload.plans import METHODS, method_id
from reload.small_models import as_bytes, places

WAYS = {
    "in place": {},
    "through loaders": {"replay": False},
    "queued": {"sources": "stable"},
    "shadow": {"shadow": "device"},
    "shadow on the host": {"shadow": "host", "sources": "stable"},
}
#: Every registered method, its parameters included; `keep` stores what arrives.
ALL = [*METHODS, ("keep", {})]


class Block(nn.Module):
    """A fused layer, a norm, buffers that are loaded and that are not, and what is derived from all of them.

    Args:
        method: of the layer.
        params: of the method.
    """

    def __init__(self, method: str, params: dict[str, str]) -> None:
        super().__init__()
        self.quant_method = olq.get_method(method, **params)
        self.quant_method.create_weights(
            self, 100, (130, 20, 20), dtype=torch.bfloat16, weight_loader=self.load_shard
        )
        self.norm = nn.Parameter(torch.empty(100, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("steps", torch.empty(3))
        self.register_buffer("angles", torch.arange(5.0), persistent=False)
        self.gain = torch.empty(100)  # a bare attribute
        olq.derive(self, "gain", lambda m: m.norm.float() + 1)
        olq.derive(self, "table", lambda m: torch.outer(m.gain, m.angles), reads=[(self, "gain")])

    def load_shard(self, parameter: Tensor, tensor: Tensor, shard: int) -> None:
        """Copy one part into its rows."""
        start, rows = ((0, 130), (130, 20), (150, 20))[shard]
        parameter.narrow(0, start, rows).copy_(tensor)


def checkpoint(scale: float, seed: int) -> dict[tuple, Tensor]:
    """Tensors by what `feed` takes beside them; rows of very different size, so that scales differ too."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {("weight", 0): (130, 100), ("weight", 1): (20, 100), ("weight", 2): (20, 100)}
    weights = {
        key: (
            torch.randn(shape, generator=draw) * scale * torch.logspace(-3, 3, shape[0])[:, None]
        ).bfloat16()
        for key, shape in shapes.items()
    }
    norm = torch.randn(100, generator=draw).bfloat16()
    return {**weights, ("norm",): norm, ("steps",): torch.randn(3, generator=draw)}


def load(model: nn.Module, tensors: dict[tuple, Tensor], **options: str) -> None:
    """One session over all tensors."""
    with olq.session(model, **options) as session:
        for (name, *shard), tensor in tensors.items():
            session.feed(name, tensor.clone(), *shard)


def attributes(model: nn.Module) -> dict[str, object]:
    """Python attributes that are no tensors: names, and what can be compared."""
    plain = (str, int, float, bool, tuple, list, type(None))
    return {n: v if isinstance(v, plain) else type(v) for n, v in vars(model).items() if n[:5] != "quant"}


@pytest.fixture(autouse=True)
def nan_in_empty_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ALL, ids=method_id)
def test_warm_equals_cold(method, way):
    name, params = method
    first, second = checkpoint(1.0, 1), checkpoint(-37.0, 2)
    warm, cold = Block(name, params), Block(name, params)
    load(warm, first)
    at, kept, seen = places(warm), attributes(warm), as_bytes(warm)
    load(cold, second)
    for tensors in (second, first, second):  # recorded, replayed, and back
        load(warm, tensors, **WAYS[way])
    assert as_bytes(warm) == as_bytes(cold)
    assert places(warm) == at
    assert attributes(warm) == kept
    changed = {n for n, b in as_bytes(warm).items() if b != seen[n]}
    constant = {"angles", "weight_format"} | {f".{n}" for n in ("angles",)}
    scales = {"weight_scale_2"} if params.get("scale_sharing") == "common" else set()
    assert changed >= set(seen) - constant - scales, "A and B have to differ in values and in scales"


def test_all_registered_methods_are_here():
    assert {name for name, _ in ALL} == set(olq.method_names())
