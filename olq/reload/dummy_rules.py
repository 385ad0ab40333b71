"""Which values dummy weights have: olq's rule, with shards, or the field's; and how a quantized weight is cut.

A rule fills boxes of local tensors, told by name and shape, and reads no old value.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import torch
from torch import Tensor

from olq import kernels
from olq.errors import ConfigError, LayoutError, UnknownNameError
from olq.methods.base import WeightPlan
from olq.numerics.random import UniformFill
from olq.reload.quantized import QuantizedWeight
from olq.reload.region import Box, intersect, size, whole

#: Elements of a piece of a dummy source.
PIECE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a box of a local tensor lies in an unsharded one.

    Args:
        shape: of the unsharded tensor.
        offset: first index of the box in it, one for each dimension.
        start: first index of the box in the local tensor; None is its beginning.
        extent: size of the box; None is all of the local tensor from `start` on.
        name: of the unsharded tensor; "" is the local tensor's name.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: tuple[int, ...] | None = None
    extent: tuple[int, ...] | None = None
    name: str = ""

    def box(self, shape: Sequence[int]) -> Box:
        """The box in a local tensor of `shape`."""
        start = self.start or (0,) * len(shape)
        extent = self.extent or tuple(n - s for n, s in zip(shape, start, strict=True))
        return tuple(range(s, s + n) for s, n in zip(start, extent, strict=True))


#: Local tensors by name; one shard, or several that tile the tensor (q, k and v of a fused weight).
Shards = Mapping[str, Shard | Sequence[Shard]]


class Rule:
    """olq's rule: a value depends on the seed, the tensor's name and the index in the unsharded tensor.

    Args:
        low: lower bound of floats.
        high: upper bound.
        seed: any integer.
        shards: of local tensors that are not whole.
    """

    def __init__(self, low: float, high: float, seed: int, shards: Shards | None = None) -> None:
        self._fill = UniformFill(low, high, seed, kernels.fill_uniform)
        self._shards = shards or {}
        self.text = f"uniform between {low} and {high}"

    def check_names(self, names: Collection[str]) -> None:
        """Raise `UnknownNameError` if a shard has another name than these."""
        unknown = [name for name in self._shards if name not in names]
        if unknown:
            raise UnknownNameError(
                "A shard belongs to no tensor of the model.",
                where="shards of dummy_init",
                found=", ".join(map(repr, unknown[:5])),
                need=f"names of the model's {len(names)} parameters and persistent buffers",
                remedy="use a tied parameter's first name; names are counted from the module that is passed",
            )

    def fill_(self, out: Tensor, name: str, shape: Sequence[int], at: Sequence[int] | None = None) -> None:
        """Fill a box of a local tensor.

        Args:
            out: the box.
            name: of the tensor.
            shape: of the tensor.
            at: first index of the box in it; None is its beginning.
        """
        at = at or (0,) * len(shape)
        inside = [range(a, a + n) for a, n in zip(at, out.shape, strict=True)]
        for shard in self._shards_of(name, shape):
            mine = shard.box(shape)
            both = [intersect(a, b) for a, b in zip(inside, mine, strict=True)]
            if not all(map(len, both)):
                continue
            part = out[tuple(slice(r.start - a, r.stop - a) for r, a in zip(both, at, strict=True))]
            offset = [o + r.start - m.start for o, r, m in zip(shard.offset, both, mine, strict=True)]
            self._fill.fill_(part, shard.name or name, shard.shape, offset)

    def pieces(self, weight: QuantizedWeight) -> Iterator[tuple[Box, Tensor]]:
        """Boxes of a load-format parameter, each with its values, in its dtype. All share one buffer."""
        boxes = list(_boxes(weight.plan))
        buffer = torch.empty(max(map(size, boxes), default=0), dtype=weight.plan.dtype, device=weight.device)
        for box in boxes:
            piece = buffer[: size(box)].view([len(r) for r in box])
            self.fill_(piece, weight.label, weight.plan.geometry.shape, [r.start for r in box])
            yield box, piece

    def _shards_of(self, name: str, shape: Sequence[int]) -> Sequence[Shard]:
        given = self._shards.get(name)
        if given is None:
            return (Shard(tuple(shape), (0,) * len(shape)),)
        shards = (given,) if isinstance(given, Shard) else tuple(given)
        if not _tile(shape, shards):
            raise LayoutError(
                "These shards do not make up the tensor.",
                where=name or "a tensor",
                found="; ".join(map(_words, shards)) or "no shard",
                need=f"boxes that tile the local shape {list(shape)}, each inside its unsharded shape",
                remedy="give one shard for each part of a fused weight, with start and extent",
            )
        return shards


class FieldRule(Rule):
    """The field's rule: torch's own generator and `uniform_`, so that equality needs no proof.

    For each tensor a generator of its own on its device, seeded with `seed`. Types under 16 bits go through a float16
    scratch of the same shape.
    """

    def __init__(self, low: float, high: float, seed: int) -> None:
        super().__init__(low, high, seed)
        self._low, self._high, self._seed = low, high, seed
        self.text += " by vLLM's rule"

    def fill_(self, out: Tensor, name: str, shape: Sequence[int], at: Sequence[int] | None = None) -> None:
        """Fill a whole tensor; its name does not matter."""
        generator = torch.Generator(device=out.device)
        generator.manual_seed(self._seed)
        if torch.finfo(out.dtype).bits >= 16:
            out.uniform_(self._low, self._high, generator=generator)
        else:
            scratch = torch.empty_like(out, dtype=torch.float16)
            out.copy_(scratch.uniform_(self._low, self._high, generator=generator))

    def pieces(self, weight: QuantizedWeight) -> Iterator[tuple[Box, Tensor]]:
        """The whole weight at once: torch's values depend on the shape that is drawn."""
        shape = weight.plan.geometry.shape
        source = torch.empty(shape, dtype=weight.plan.dtype, device=weight.device)
        self.fill_(source, weight.label, shape)
        yield whole(shape), source


def choose_rule(low: float, high: float, seed: int, compat: str | None, shards: Shards | None) -> Rule:
    """The rule that `compat` names.

    Raises:
        ConfigError: there is no such rule, it can't use shards, or the bounds hold no range.
    """
    if compat is None:
        return Rule(low, high, seed, shards)
    if compat != "vllm" or shards:
        raise ConfigError(
            "There is no such rule for dummy weights.",
            where="compat of a dummy load",
            found=f"compat={compat!r}" + (" with shards" if shards else ""),
            need='None, or "vllm" without shards: its values depend on the local shape',
            remedy="leave compat out for values that don't depend on device, layout and number of ranks",
        )
    return FieldRule(low, high, seed)


def _boxes(plan: WeightPlan) -> Iterator[Box]:
    """Cut a weight into boxes of whole scale units: one unit, or more up to `PIECE_ELEMENTS`."""
    geometry = plan.geometry
    width = geometry.columns
    for lead in product(*(range(extent) for extent in geometry.lead)):
        at = tuple(range(i, i + 1) for i in lead)
        for part, (start, rows) in enumerate(zip(geometry.starts, geometry.parts, strict=True)):
            unit_rows, unit_columns = plan.unit_of(part)
            across = max(PIECE_ELEMENTS // (unit_rows * unit_columns), 1) * unit_columns
            down = max(PIECE_ELEMENTS // (unit_rows * max(min(across, width), 1)), 1) * unit_rows
            for i in range(0, rows, down):
                for j in range(0, width, across):
                    inside = range(start + i, start + min(i + down, rows))
                    yield (*at, inside, range(j, min(j + across, width)))


def _tile(shape: Sequence[int], shards: Sequence[Shard]) -> bool:
    """Whether the shards' boxes cover a tensor of `shape`, without overlap, and lie inside their unsharded shapes."""
    for shard in shards:
        given = [shard.shape, shard.offset, shard.start or shape, shard.extent or shape]
        if any(len(numbers) != len(shape) for numbers in given):
            return False
        box = shard.box(shape)
        for r, n, offset, unsharded in zip(box, shape, shard.offset, shard.shape, strict=True):
            if r.start < 0 or r.stop > n or offset < 0 or offset + len(r) > unsharded:
                return False
    boxes = [shard.box(shape) for shard in shards]
    apart = all(
        any(not intersect(a, b) for a, b in zip(one, other, strict=True))
        for one, other in combinations(boxes, 2)
    )
    return apart and sum(map(size, boxes)) == prod(shape)


def _words(shard: Shard) -> str:
    start = f" from {list(shard.start)}" if shard.start else ""
    extent = f" of {list(shard.extent)}" if shard.extent else ""
    return f"a box{extent}{start} at {list(shard.offset)} of {list(shard.shape)}"
