"""What a tensor gets in a dummy load: decided by its name, its dtype and whether it is a buffer; never by its values.

A dummy load stands in for a checkpoint. So it writes what a checkpoint would write, parameters and persistent buffers,
and a model runs on the result: no NaN, no index out of range, no division by something near zero.

uniform   floats
one       scales (a word `scale` in the last component of the name, or dtype E8M0), variances, 0-d constants
zero      packed codes, integers and booleans that are parameters: the code of 0.0, and an index that exists
left      integer buffers, which constructors fill (maps, positions, counters); what is on meta; what has no elements
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Kind = Literal["uniform", "one", "zero", "left"]

_SCALE = re.compile(r"(^|_)scales?(_|$)")
_VARIANCE = frozenset({"running_var"})
#: Integer dtypes that hold scales: E8M0 bytes, alone or four in a word.
_E8M0_ONES = {torch.uint8: 0x7F, torch.int32: 0x7F7F7F7F}
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a tensor gets, and why."""

    kind: Kind
    reason: str


def treatment(name: str, tensor: Tensor, *, buffer: bool = False) -> Treatment:
    """What olq's own rule gives to a tensor.

    Args:
        name: its name; the last component counts.
        tensor: its values are not read.
        buffer: whether it is a persistent buffer rather than a parameter.
    """
    if (left := _without_memory(tensor)) is not None:
        return left
    leaf = name.rpartition(".")[2]
    if tensor.dtype is torch.float8_e8m0fnu:
        return Treatment("one", "an E8M0 scale")
    if (
        _SCALE.search(leaf)
        and (tensor.is_floating_point() or tensor.dtype in _E8M0_ONES)
        and not _packed(tensor)
    ):
        return Treatment("one", "a scale")
    if leaf in _VARIANCE and tensor.is_floating_point():
        return Treatment("one", "a variance")
    if _packed(tensor):
        return Treatment("zero", "packed codes")
    if tensor.is_floating_point() or tensor.is_complex():
        return Treatment("uniform", "floats") if tensor.dim() else Treatment("one", "a 0-d constant")
    if buffer:
        return Treatment("left", "an integer buffer, filled by its constructor")
    return Treatment("zero", "integers or packed codes")


def treatment_vllm(tensor: Tensor) -> Treatment:
    """What the field's rule gives to a tensor: floats are drawn, scales and constants too; all else is left."""
    if (left := _without_memory(tensor)) is not None:
        return left
    if _packed(tensor):
        return Treatment("zero", "packed codes: torch has no cast to them")
    if tensor.is_floating_point():
        return Treatment("uniform", "floats")
    return Treatment("left", "not a floating type")


def write_one_(tensor: Tensor) -> None:
    """Write 1, or the scale bytes that mean 1."""
    if (word := _E8M0_ONES.get(tensor.dtype)) is not None:
        tensor.fill_(word)
    elif tensor.element_size() == 1:  # float8 types lack operators on some devices; bytes do not
        byte = torch.ones((), dtype=torch.float32).to(tensor.dtype).view(torch.uint8)
        tensor.view(torch.uint8).fill_(int(byte))
    else:
        tensor.fill_(1)


def write_zero_(tensor: Tensor) -> None:
    """Write bytes 0."""
    tensor.view(_BYTES[tensor.element_size()]).fill_(0)


def own_memory(tensor: Tensor) -> Tensor:
    """A view without the repetitions of expanded dimensions: each element once."""
    view = tensor.detach()
    for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            view = view.narrow(d, 0, 1)
    return view


def _without_memory(tensor: Tensor) -> Treatment | None:
    if is_lazy(tensor):
        return Treatment("left", "its shape is not known yet")
    if tensor.is_meta:
        return Treatment("left", "on the meta device")
    if not tensor.numel():
        return Treatment("left", "no elements")
    return None


def _packed(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float4_e2m1fn_x2


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter or persistent buffer of a model.

    Args:
        name: its first name.
        tensor: the object.
        treatment: what it gets.
    """

    name: str
    tensor: Tensor
    treatment: Treatment


def shared_memory(entries: list[Entry]) -> dict[str, str]:
    """Entries that lie in the memory of another one that is written, by name, each with that one's name.

    Floats come before scales and integers, larger tensors before smaller ones, so that a byte arena never counts as
    the owner of the weights in it.
    """
    ranks: dict[Kind, int] = {"uniform": 0, "one": 1, "zero": 2, "left": 3}
    found: dict[str, str] = {}
    owners: dict[tuple[torch.device, int], list[tuple[range, bool, Entry]]] = {}
    spans = [(_span(e.tensor), e) for e in entries if e.treatment.kind != "left"]
    for (span, dense), entry in sorted(spans, key=lambda s: (ranks[s[1].treatment.kind], -len(s[0][0]))):
        storage = entry.tensor.device, entry.tensor.untyped_storage().data_ptr()
        known = owners.setdefault(storage, [])
        for other, other_dense, owner in known:
            inside = other.start <= span.start and span.stop <= other.stop
            if inside and (other_dense or _geometry(owner.tensor) == _geometry(entry.tensor)):
                found[entry.name] = owner.name
                break
        else:
            known.append((span, dense, entry))
    return found


def _span(tensor: Tensor) -> tuple[range, bool]:
    """Bytes of the storage from the first to the last, and whether the tensor has all of them."""
    own = own_memory(tensor)
    reach = 1 + sum((n - 1) * s for n, s in zip(own.shape, own.stride(), strict=True))
    start, size = own.storage_offset() * own.element_size(), own.element_size()
    return range(start, start + reach * size), reach == own.numel()


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model.

    Args:
        entries: what a checkpoint may hold, each object once.
        others: second names, and buffers that no checkpoint holds, each with what a report says of it.
    """

    entries: list[Entry]
    others: dict[str, str]


def tensors_of(model: nn.Module, compat: str | None, skip: Collection[int] = ()) -> Tensors:
    """List parameters and buffers, however modules are nested or shared.

    Args:
        model: any module.
        compat: whose rule says what a tensor gets.
        skip: ids of tensors to leave out.
    """
    seen: dict[int, str] = {}
    entries: list[Entry] = []
    others: dict[str, str] = {}
    for name, tensor, buffer, persistent in _named_tensors(model):
        if id(tensor) in skip:
            continue
        if not persistent:
            others[name] = "left: a buffer that no checkpoint holds"
        elif id(tensor) in seen:
            others[name] = f"alias of {seen[id(tensor)]}"
        else:
            seen[id(tensor)] = name
            what = treatment(name, tensor, buffer=buffer) if compat is None else treatment_vllm(tensor)
            entries.append(Entry(name, tensor, what))
    return Tensors(entries, others)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool, bool]]:
    """Name, tensor, whether it is a buffer, and whether a checkpoint holds it."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield start + name, parameter, False, True
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield start + name, buffer, True, name not in module._non_persistent_buffers_set
