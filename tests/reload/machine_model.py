"""A small engine's model with one layer of each kind, its checkpoints, and what must be true of it: `Truth`."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

import olq
from reload.engine_layers import bytes_of, weight
from reload.small_models import TOKENS, tensors

#: What a checkpoint holds. Two items make up `down.weight`, three `qkv.weight`.
SHAPES = {
    "emb": (20, 32), "q": (48, 32), "k": (16, 32), "v": (16, 32), "d0": (32, 40), "d1": (32, 40),
    "mid": (32, 32), "bias": (32,), "norm": (32,),
}  # fmt: skip
VERSIONS = (1, 2, 3)
#: Items of each parameter, of each scope that the machine knows, and as `feed` is told of them.
LABELS = {
    "emb.weight": ("emb",), "head.weight": ("emb",), "qkv.weight": ("q", "k", "v"), "down.weight": ("d0", "d1"),
    "mid.weight": ("mid",), "mid.bias": ("bias",), "norm": ("norm",),
}  # fmt: skip
SCOPES = {
    "qkv": {"q", "k", "v"}, "emb": {"emb"}, "mid": {"mid", "bias"}, "mid.bias": {"bias"}, "norm": {"norm"},
    "down": {"d0", "d1"}, "head": {"emb"}, "mid.weight": {"mid"},
}  # fmt: skip
FEEDS = {
    "emb": ("emb.weight",), "q": ("qkv.weight", "q"), "k": ("qkv.weight", "k"), "v": ("qkv.weight", "v"),
    "d0": ("down.weight", 0), "d1": ("down.weight", 1), "mid": ("mid.weight",), "bias": ("mid.bias",),
    "norm": ("norm",),
}  # fmt: skip
LOOP_NAMES = {item: FEEDS[item][0] if len(FEEDS[item]) == 1 else item for item in SHAPES}
#: Items whose values may wait in the queue, and those whose loader can be told to fail half-way.
QUEUED, LOADED = {"q", "k", "v", "d0", "d1", "mid"}, {"q", "k", "v", "d0", "d1", "norm"}


class FaultError(Exception):
    """What a loader raises when it is told to."""


class Layer(nn.Module):
    """A layer of an engine whose parts have ids."""

    def __init__(
        self, method: str, columns: int, rows: tuple[int, ...], parts: dict[object, tuple[slice, slice]]
    ) -> None:
        super().__init__()
        self.parts, self.fail = parts, False
        self.quant_method = olq.get_method(method)
        self.quant_method.create_weights(
            self, columns, rows, dtype=torch.bfloat16, weight_loader=self.load_part
        )

    def load_part(self, parameter: Tensor, tensor: Tensor, part: object) -> None:
        """Copy one part; fail after half of its rows if told to."""
        rows = parameter[self.parts[part]]
        if self.fail:
            rows[:4].copy_(tensor[:4])
            raise FaultError
        rows.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """`x @ W.T`."""
        return self.quant_method.apply(self, x)


class Tiny(nn.Module):
    """An embedding with a tied quantized head, a fused fp8 layer, an nvfp4, an mxfp8 one, a norm, and mirrors."""

    def __init__(self) -> None:
        super().__init__()
        every = slice(None)
        self.fail = False
        self.emb = nn.Embedding(20, 32, dtype=torch.bfloat16)
        self.qkv = Layer("fp8", 32, (48, 16, 16), {
            "q": (slice(0, 48), every), "k": (slice(48, 64), every), "v": (slice(64, 80), every)
        })  # fmt: skip
        self.down = Layer("nvfp4", 80, (32,), {0: (every, slice(0, 40)), 1: (every, slice(40, 80))})
        self.mid = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.norm = nn.Parameter(torch.zeros(32, dtype=torch.bfloat16), requires_grad=False)
        vars(self.norm)["weight_loader"] = self.load_norm
        self.head = nn.Linear(32, 20, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.emb.weight
        olq.prepare(self, olq.QuantConfig(method="mxfp8"))
        olq.derive(self, "mirror", Tiny.norm_mirror)
        olq.derive(self.mid, "decoded", mid_decoded)

    def norm_mirror(self) -> Tensor:
        """The norm in float32."""
        return self.norm.float()

    def load_norm(self, parameter: Tensor, tensor: Tensor) -> None:
        """Copy, or fail after half of it."""
        if self.fail:
            parameter.data[:16].copy_(tensor[:16])
            raise FaultError
        parameter.data.copy_(tensor)

    def load_weights(self, weights) -> None:
        """Names are those of `LOOP_NAMES`."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            item = next(item for item, loop_name in LOOP_NAMES.items() if loop_name == name)
            label, *shard = FEEDS[item]
            loader = getattr(parameters[label], "weight_loader", None)
            if loader is None:
                parameters[label].data.copy_(tensor)
            else:
                loader(parameters[label], tensor, *shard)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.mid(self.down(self.qkv(self.emb(tokens) * self.norm))))


def mid_decoded(mid: nn.Module) -> Tensor:
    """What the mxfp8 layer computes with."""
    return olq.dequantize(mid, dtype=torch.float32)


def make() -> Tiny:
    """A prepared `Tiny` without weights."""
    with olq.meta_parameters():
        return Tiny()


@lru_cache
def value(item: str, version: int) -> Tensor:
    """What a checkpoint holds."""
    return weight(*SHAPES[item], seed=100 * version + list(SHAPES).index(item))


def group_of(name: str) -> tuple[str, ...]:
    """The items that a tensor of the live model is made of."""
    derived = {"mirror": ("norm",), "mid.decoded": ("mid",)}
    return derived.get(name) or LABELS[name.removesuffix("_format").removesuffix("_2").removesuffix("_scale")]


@dataclass(frozen=True)
class Cold:
    """What a first load of a fresh model gives: bytes and digests by name, and logits."""

    bytes: dict[str, bytes]
    digests: dict[str, str]
    logits: Tensor


@lru_cache(maxsize=4096)
def cold(versions: tuple[int, ...]) -> Cold:
    """A first load of these versions, one for each item."""
    model = make()
    with olq.session(model, replay=False) as session:
        for item, version in zip(SHAPES, versions, strict=True):
            label, *shard = FEEDS[item]
            session.feed(label, value(item, version), *shard)
    found = {name: bytes_of(tensor) for name, tensor in tensors(model).items()}
    return Cold(found, dict(olq.fingerprint(model).digests), model(TOKENS))


@dataclass
class Open:
    """An open load. `plans` are those that it may use, `new` those that it has recorded."""

    items: set[str]
    shadow: bool
    stable: bool
    plans: dict[tuple, torch.dtype]
    arrived: dict[str, int] = field(default_factory=dict)
    queue: dict[str, int | None] = field(default_factory=dict)
    new: dict[tuple, torch.dtype] = field(default_factory=dict)
    emb_name: str = ""
    touched: bool = False
    replayed: int = 0
    dropped: bool = False


class Truth:
    """What must be true. Versions in `memory` and `derived` are None where nothing is known of the bytes."""

    def __init__(self) -> None:
        self.memory: dict[str, int | None] = dict.fromkeys(SHAPES)
        self.derived, self.plans, self.generation = dict(self.memory), {}, 0
        self.servable, self.load = False, None

    @property
    def callable(self) -> bool:
        return self.servable and (self.load is None or self.load.shadow)

    def begin(self, items: set[str], shadow: bool, stable: bool, replay: bool) -> bool:
        if self.load is not None and not self.load.dropped and self.load.touched:
            return False
        if self.load is not None:
            self.abort()
        if (shadow or items != set(SHAPES)) and not self.servable:
            return False
        self.load = Open(items, shadow, stable, self.plans if replay else {})
        return True

    def store(self, item: str, version: int | None) -> None:
        """A loader, or a replay, has written; None is a value that is refused in the middle."""
        pair = {"d0": "d1", "d1": "d0"}.get(item, item)
        whole = pair in self.load.arrived and pair not in self.load.queue
        if whole and not self.load.shadow:
            self.memory[item] = version
            self.memory[pair] = self.load.arrived[pair] if version is not None else None
        if version is None:
            del self.load.arrived[item]

    def feed(self, item: str, version: int | None, key: tuple, dtype: torch.dtype) -> bool:
        planned = self.load.plans.get(key) == dtype
        self.load.touched, self.load.arrived[item] = True, version
        if planned and self.load.stable and item in QUEUED:
            self.load.queue[item] = version
            return True
        self.store(item, version)
        if version is not None and planned:
            self.load.replayed += 1
        elif version is not None and item != "emb":
            self.load.new[key] = dtype
        return version is not None

    def flush(self) -> bool:
        while self.load.queue:
            item = next(iter(self.load.queue))
            version = self.load.queue.pop(item)
            self.store(item, version)
            if version is None:
                return False
            self.load.replayed += 1
        return True

    def missing(self) -> set[str]:
        return {
            name for name, items in LABELS.items() if set(items) & self.load.items - self.load.arrived.keys()
        }

    def commit(self) -> None:
        self.memory.update(self.load.arrived)
        self.derived, self.servable, self.load, load = dict(self.memory), True, None, self.load
        self.plans.update(load.new)
        self.generation += 1

    def abort(self) -> None:
        self.servable, self.load = self.servable and (self.load.shadow or not self.load.touched), None
