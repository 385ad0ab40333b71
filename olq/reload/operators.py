"""What operators do to the tensors that they are given, as far as a counter of writes has to know."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

COPY = aten.copy_.default
FOREACH_COPY = aten._foreach_copy_.default
#: Every element becomes a constant: the second argument, or 0.
CONSTANTS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
#: Every element is replaced by a random number, whatever was there.
RANDOM = frozenset(
    {
        aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.random_.default,
        aten.random_.to, getattr(aten.random_, "from"),
    }
)  # fmt: skip
#: Some elements, chosen by an index, are replaced.
SCATTERS = frozenset({aten.index_put_.default, aten.index_copy_.default})
#: New memory of another tensor's shape or device, whose values don't matter.
FACTORIES_LIKE = frozenset(
    {
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
        aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default,
    }
)  # fmt: skip


def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """All tensors among the arguments, those in lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator changes: by its name with an underscore, or through `out=`."""
    for i, name in _written_arguments(func):
        yield from tensors((args[i] if i < len(args) else kwargs.get(name),), {})


@lru_cache(maxsize=1024)
def out_argument(func: Any) -> str | None:
    """The name of the single argument through which an operator returns its result, or None."""
    names = [a.name for a in func._schema.arguments if a.is_out]
    return names[0] if len(names) == 1 else None


@lru_cache(maxsize=1024)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def on_device(args: Iterable[Any], device: torch.device) -> list[Any]:
    """Arguments with their tensors on one device, those in lists included: an index may lie in the host's memory."""
    return [
        a.to(device) if isinstance(a, Tensor) else on_device(a, device) if isinstance(a, (list, tuple)) else a
        for a in args
    ]


def scatter_of_true(func: Any, args: tuple[Any, ...]) -> Callable[[Tensor], Any] | None:
    """A scattering write, to be repeated on a mask with True for its values; None for other operators."""
    if func is aten.index_put_.default:
        return lambda mask: func(mask, args[1], torch.ones((), dtype=torch.bool, device=mask.device))
    if func is aten.index_copy_.default:
        return lambda mask: func(mask, args[1], args[2], torch.ones_like(args[3], dtype=torch.bool))
    return None
