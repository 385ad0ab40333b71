"""Dummy weights: a model that runs, and a load that takes the real path, without a checkpoint.

What stays in high precision is written in place: no old value is read, scratch is 0.6 MiB on a CPU, none where a kernel
fills. What is quantized online arrives as a checkpoint's weight would: in pieces, through a loader's copy, the counter
and the method; so the same code runs, the same memory is used, and a later reload finds what a real load would leave.

Values    docs/formats/dummy.md: a function of (seed, name, index in the unsharded tensor). `compat="vllm"` draws as
          the field does instead.
Which     olq.reload.dummy_kinds: what scales, constants, integers, packed and shared tensors get.
Memory    law 5: a piece is whole scale units of at most 256 Ki elements; a unit that is larger (a whole part: nvfp4,
          a per-tensor scale) is made whole, once, in the parameter's dtype, which is what has to wait anyway.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from olq.errors import LayoutError
from olq.layout import overlaps
from olq.methods.state import find_state
from olq.reload.dummy_kinds import (
    Entry,
    own_memory,
    shared_memory,
    tensors_of,
    treatment,
    treatment_vllm,
    write_one_,
    write_zero_,
)
from olq.reload.dummy_rules import Rule, Shard, Shards, choose_rule
from olq.reload.progress import PlainParameter
from olq.reload.quantized import QuantizedWeight
from olq.reload.region import slices, whole
from olq.reload.session import Session
from olq.report import Report


@dataclass(frozen=True)
class DummyReport:
    """What a dummy load did.

    Args:
        tensors: each parameter and buffer by name, with what it got and why.
        load: report of the quantized layers' load; None for a model without.
    """

    tensors: Mapping[str, str] = field(default_factory=dict)
    load: Report | None = None

    def table(self) -> str:
        """One line a tensor."""
        width = max(map(len, self.tensors), default=0)
        return "\n".join(f"{name.ljust(width)}  {what}" for name, what in self.tensors.items())

    def __str__(self) -> str:
        return self.table()


def dummy_init(
    model: nn.Module,
    low: float = -1e-3,
    high: float = 1e-3,
    seed: int = 1234,
    *,
    compat: str | None = None,
    shards: Shards | None = None,
) -> DummyReport:
    """Give a model dummy weights. Layers that quantize online go through a whole load and are live afterwards.

    Args:
        model: any module, on any device. Its quantized layers may be prepared, open or live; a live layer's kernel
            tensors keep their addresses. Names, and so values, are counted from this module.
        low: lower bound of the floats.
        high: upper bound.
        seed: any integer for olq's rule; what `torch.Generator.manual_seed` takes for `compat="vllm"`.
        compat: None is olq's rule: the same values on each device, for any layout and number of ranks. "vllm" is the
            field's: for each tensor a generator of its own on its device, seeded with `seed`; types under 16 bits go
            through float16; scales are drawn like weights. It needs 2 bytes of scratch for each element of such a type,
            and each quantized weight in full precision, one at a time.
        shards: where local tensors lie in the unsharded ones, for values that don't depend on the number of ranks.

    Returns:
        What each tensor got. The global random state is not touched.

    Raises:
        ConfigError: the bounds or `compat` make no sense, or `shards` are given to a rule that can't use them.
        UnknownNameError: `shards` has a name that the model lacks.
        LayoutError: bounds outside a dtype's range, shards that do not tile a tensor, elements that share memory.
        StateError: a load of the model is running, or a prepared model has parameters without memory.
    """
    rule = choose_rule(low, high, seed, compat, shards)
    if not any(find_state(module) for module in model.modules()):
        tensors = tensors_of(model, compat)
        rule.check_names({entry.name for entry in tensors.entries})
        return DummyReport({**_write_all(tensors.entries, rule), **tensors.others})
    with Session(model) as session:
        weights = session.names.weights
        tensors = tensors_of(model, compat, skip={id(weight.parameter) for weight in weights})
        rule.check_names({entry.name for entry in tensors.entries} | {weight.label for weight in weights})
        done = _write_all(tensors.entries, rule)
        _count(session, tensors.entries)
        followers = {id(one) for progress in session.names.progress for one in progress.followers}
        for weight in weights:
            if id(weight) not in followers:
                _feed(session, weight, rule)
                done[weight.label] = f"{rule.text}, quantized by {weight.method.name}"
        done |= tensors.others
        done |= {name: f"alias of {owner}" for name, owner in session.names.aliases.items()}
        return DummyReport(done, session.commit())


def dummy_init_tensor(
    tensor: Tensor,
    low: float = -1e-3,
    high: float = 1e-3,
    seed: int = 1234,
    *,
    name: str = "",
    compat: str | None = None,
    shards: Shard | Sequence[Shard] = (),
) -> str:
    """Give one tensor dummy values, in place. Arguments as in `dummy_init`.

    Args:
        tensor: any strides, any device; taken as a parameter.
        low: lower bound of floats.
        high: upper bound.
        seed: see `dummy_init`.
        name: decides the values, and what the tensor is: a name that ends in `_scale` gets ones.
        compat: see `dummy_init`.
        shards: where the tensor lies in the unsharded one.

    Returns:
        What it got and why.

    Raises:
        ConfigError: see `dummy_init`.
        LayoutError: see `dummy_init`.
    """
    rule = choose_rule(low, high, seed, compat, {name: shards} if shards else None)
    what = treatment(name, tensor) if compat is None else treatment_vllm(tensor)
    return _write(Entry(name, tensor, what), rule)


def _write_all(entries: list[Entry], rule: Rule) -> dict[str, str]:
    """Write what stays in high precision. Integers first: weights that are views of a byte arena win over it."""
    shared = shared_memory(entries)
    done = {entry.name: "" for entry in entries}
    for kind in ("left", "zero", "one", "uniform"):
        for entry in (entry for entry in entries if entry.treatment.kind == kind):
            owner = shared.get(entry.name)
            done[entry.name] = f"alias of {owner}" if owner is not None else _write(entry, rule)
    return done


def _write(entry: Entry, rule: Rule) -> str:
    """Give one tensor what it gets; in words."""
    what, tensor = entry.treatment, entry.tensor
    if what.kind == "left":
        return f"left: {what.reason}"
    own = own_memory(tensor)
    if overlaps(own.shape, own.stride()):
        raise LayoutError(
            "Elements of this tensor share memory, so each can't get a value of its own.",
            where=entry.name or "a tensor",
            found=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            need="elements apart from each other; an expanded dimension is fine",
            remedy="fill the tensor that it is a view of",
        )
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if what.kind != "uniform":
            (write_one_ if what.kind == "one" else write_zero_)(own)
            return f"{what.kind}: {what.reason}"
        shape = tensor.shape
        if own.is_complex():  # a float tensor with a last dimension of 2, for shards too
            own, shape = torch.view_as_real(own), (*shape, 2)
        rule.fill_(own, entry.name, shape)
        return f"{rule.text}: {what.reason}"


def _count(session: Session, entries: list[Entry]) -> None:
    """Tell the session what has been written; quantized weights tied to a parameter take it from there."""
    left = {id(entry.tensor) for entry in entries if entry.treatment.kind == "left"}
    required = {id(progress) for progress in session.names.required}
    for progress in session.names.progress:
        written = id(progress) in required or id(progress.parameter) not in left
        if written and isinstance(progress, PlainParameter):
            progress.arrive(whole(progress.parameter.shape), progress.label)


def _feed(session: Session, weight: QuantizedWeight, rule: Rule) -> None:
    """Load one quantized weight as a loader would: copies into slices of its parameter, seen by a counter."""
    counter = session.counter()
    for box, piece in rule.pieces(weight):
        with counter.scope(weight.label):
            weight.parameter[slices(box)].copy_(piece)
