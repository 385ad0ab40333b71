"""Tensors that hang on a module without being its parameters or buffers: found, kept at their addresses, reported.

`find_bare` looks into `vars(module)`: tensors, lists, tuples, dicts, `functools.partial`, the owner of a bound method,
and one level of plain helper objects. It never enters other modules, closures or `__slots__`.

    keep         after a hook has run again, its tensors lie where they lay before, with the new values.
    undeclared   what no load writes and nobody declared, each with the reason in words: reported, not lost.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyType

import torch
from torch import Tensor, nn

from olq.errors import LayoutError
from olq.methods.guards import GUARDED
from olq.methods.state import find_state
from olq.patterns import join
from olq.reload.ledger import storage_key
from olq.reload.tree import Tree
from olq.reload.views import span

#: What `nn.Module` itself keeps in `vars`: parameters, buffers, modules, hooks.
_TORCH = frozenset(vars(nn.Module()))
#: olq's own attributes.
_OLQ = "quant_"
_ATOMS = frozenset(
    {str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, ProxyType}
)
_CLOSED = (nn.Module, type, FunctionType, BuiltinFunctionType, ModuleType, torch.Generator)
_DEEPEST, _MOST = 4, 10_000  # nested containers; objects looked at in one module


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor hangs.

    Args:
        path: below the module: "mirror", "scales[2]", "kernel.scale".
        holder: the dict or list that holds it; None for a tuple, which can't be written to.
        key: its key there.
        tensor: the object.
        alias: its memory at the time it was found; `tensor.data = x` does not change it.
        helper: class of the helper object that holds it, or "".
        version: torch's count of in-place writes; -1 where there is none.
        registered: it is a parameter or a buffer.
    """

    path: str
    holder: Any
    key: Any
    tensor: Tensor
    alias: Tensor
    helper: str
    version: int
    registered: bool = False


@dataclass
class _Search:
    """One walk through `vars(module)`."""

    places: list[Place]
    cut: list[str]
    seen: set[int]
    left: int = _MOST

    def mapping(self, holder: Mapping[Any, Any], path: str, depth: int, helper: str, *, names: bool) -> None:
        # Of long tables of words or numbers, such as a vocabulary, only the types are looked at.
        if not _ATOMS.issuperset(map(type, holder.values())):
            for key, value in list(holder.items()):
                if path or not (key in _TORCH or str(key).startswith(_OLQ)):
                    inner = f"{path}.{key}".lstrip(".") if names else f"{path}[{key!r}]"
                    self.visit(holder, key, value, inner, depth, helper)

    def sequence(self, holder: Any, path: str, depth: int, helper: str) -> None:
        if not _ATOMS.issuperset(map(type, holder)):
            for i, value in enumerate(list(holder)):
                self.visit(holder, i, value, f"{path}[{i}]", depth, helper)

    def visit(self, holder: Any, key: Any, value: Any, path: str, depth: int, helper: str) -> None:
        if type(value) in _ATOMS:
            return
        if isinstance(value, Tensor):
            writable = holder if isinstance(holder, dict | list) else None
            self.places.append(_place(path, writable, key, value, helper))
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if self.left <= 0 or depth >= _DEEPEST:
            self.cut.append(path)
            return
        self.left -= 1
        if isinstance(value, dict):
            self.mapping(value, path, depth + 1, helper, names=False)
        elif isinstance(value, list | tuple):
            self.sequence(value, path, depth + 1, helper)
        elif isinstance(value, partial):
            self.mapping(value.keywords, path, depth + 1, helper or "functools.partial", names=True)
            self.sequence(value.args, f"{path}.args", depth + 1, helper or "functools.partial")
        elif isinstance(value, MethodType):
            self.visit(None, None, value.__self__, f"{path}.__self__", depth, helper)
        elif (
            not helper
            and not isinstance(value, _CLOSED)
            and isinstance(getattr(value, "__dict__", None), dict)
        ):
            self.mapping(vars(value), path, depth + 1, type(value).__name__, names=True)


def find_bare(module: nn.Module) -> tuple[list[Place], list[str]]:
    """Tensors in `vars(module)`, those of torch and olq left out.

    Returns:
        Each with its place, one under two paths twice; and the paths at which a limit stopped the search: containers
        nested more than four deep, or more than 10,000 objects.
    """
    search = _Search([], [], {id(module)})
    search.mapping(vars(module), "", 0, "", names=True)
    return search.places, search.cut


def find_all(root: nn.Module) -> dict[str, Place]:
    """Parameters, buffers and bare tensors of a module and its descendants, by name below it."""
    found: dict[str, Place] = {}
    for module, prefix in Tree(root).modules.items():
        own = [
            replace(_place(name, holder, name, tensor, ""), registered=True)
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        found.update({join(prefix, place.path): place for place in (*own, *find_bare(module)[0])})
    return found


def _may_hold(module: nn.Module) -> bool:
    """Whether a look into `vars(module)` is worth its time: most modules have nothing but torch's and olq's own."""
    for key, value in vars(module).items():
        kind = type(value)
        if kind in _ATOMS or key in _TORCH or key in GUARDED or key.startswith(_OLQ):
            continue
        items = value.values() if kind is dict else value if kind is list or kind is tuple else None
        if items is None or not _ATOMS.issuperset(map(type, items)):
            return True
    return False


class Memory:
    """The memory that loads write: parameters, buffers and kernel tensors of some modules.

    Args:
        modules: whose.
        without: (module, name) pairs that do not count: derived tensors.
    """

    def __init__(self, modules: Iterable[nn.Module], without: Iterable[tuple[nn.Module, str]] = ()) -> None:
        skipped = {(id(module), name) for module, name in without}
        self._kept: list[Tensor] = []  # ids of storages come back once they are freed
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for module in modules:
            for name, tensor in own_tensors(module):
                if (id(module), name) not in skipped:
                    self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's memory too."""
        self._kept.append(tensor)
        first, last = _span(tensor)
        self._spans.setdefault(key_of(tensor), []).append((first, last))

    def shares(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the same storage as something here."""
        return key_of(tensor) in self._spans

    def overlaps(self, tensor: Tensor) -> bool:
        """Whether bytes between the tensor's first and last are also between those of something here."""
        start, stop = _span(tensor)
        return any(a < stop and start < b for a, b in self._spans.get(key_of(tensor), ()))


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and the kernel and load-format tensors of the module itself."""
    state = find_state(module)
    held = () if state is None else (state.kernel, state.tags, state.load_parameters)
    for tensors in (module._parameters, module._buffers, *held):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def keep(before: Mapping[str, Place], after: Mapping[str, Place], weights: Memory, label: str) -> None:
    """Put tensors that were replaced back to where they lay, with the new values.

    Args:
        before: tensors by path before a hook ran.
        after: the same afterwards.
        weights: memory that must not be written here.
        label: the hook's full name, for messages.

    Raises:
        LayoutError: a tensor has another shape, strides, dtype or device than the one it replaces, lies in a tuple,
            or replaces a view of a weight.
    """
    moved = _moved(before, after)
    wrong = [error for old, new in moved if (error := _misfit(old, new, weights, label)) is not None]
    if not wrong:
        targets = {key_of(old.alias) for old, _ in moved}
        # Two tensors that changed places: the values of one would be gone before the other takes them.
        values = [new.alias.clone() if key_of(new.alias) in targets else new.alias for _, new in moved]
        for (old, _), value in zip(moved, values, strict=True):
            write(old.alias, value)
    put_back(before, after)
    if wrong:
        raise wrong[0]


def put_back(before: Mapping[str, Place], after: Mapping[str, Place]) -> None:
    """Hang the tensors of `before` where others hang now, with the memory that they had."""
    for old, new in _moved(before, after):
        if not same_memory(old.tensor, old.alias):
            old.tensor.data = old.alias
        if new.holder is not None:
            new.holder[new.key] = old.tensor


def written(before: Mapping[str, Place], after: Mapping[str, Place]) -> set[str]:
    """Paths that are new, replaced, or written in place as far as torch counts writes (it does not for `.data`)."""

    def untouched(old: Place, new: Place) -> bool:
        # A sparse tensor has no storage of its own to compare.
        same = (
            old.tensor is new.tensor
            if new.alias.layout is not torch.strided
            else same_memory(old.alias, new.alias)
        )
        return same and old.version == new.version

    return {path for path, new in after.items() if path not in before or not untouched(before[path], new)}


def undeclared(tree: Tree, covered: Container[str]) -> dict[str, str]:
    """What no load writes and nobody declared; see `olq.reload.derived.undeclared`.

    Args:
        tree: of the model whose tensors are looked for.
        covered: names of what `derive` or a hook takes care of.
    """
    shown: list[Tensor] = []
    bare: dict[str, Place] = {}
    reasons: dict[str, str] = {}
    for module, prefix in tree.modules.items():
        if not _may_hold(module):
            continue
        places, cut = find_bare(module)
        for place in places:
            name = join(prefix, place.path)
            if name in covered:
                shown.append(place.tensor)
            elif place.tensor.numel():
                bare[name] = place
        reasons |= {join(prefix, path): _CUT for path in cut}
    if not bare:
        return reasons
    known = Memory(tree.modules)
    for tensor in shown:
        known.add(tensor)
    first: dict[int, str] = {}
    also: dict[str, int] = {}
    for name, place in bare.items():
        if known.shares(place.tensor):
            continue
        if (other := first.setdefault(id(place.tensor), name)) == name:
            reasons[name] = _reason(place)
        else:
            also[other] = also.get(other, 0) + 1
    return {name: reason + _also(also.get(name, 0)) for name, reason in reasons.items()}


def write(target: Tensor, values: Tensor) -> None:
    """Copy in place; the target may be an inference tensor."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(values)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same elements in the same way."""
    return key_of(a) == key_of(b) and facts(a) == facts(b) and _offset(a) == _offset(b)


def facts(tensor: Tensor) -> str:
    """Shape, strides, dtype and device, in words."""
    strides = f", strides {list(tensor.stride())}" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype}, shape {list(tensor.shape)}{strides}, on {tensor.device}"


def key_of(tensor: Tensor) -> int:
    """Identity of the storage, or of a tensor that has none of its own."""
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


_BARE = (
    "a bare tensor attribute that no load writes: declare it with olq.derive if it is computed from weights"
)
_HELPER = (
    "a tensor in a helper object ({}) that no load writes: refresh or rebuild the helper in a hook, olq.after_load, "
    "if it is computed from weights"
)
_PARAMETER = (
    "a parameter that its module does not register, so that no load finds it: use nn.ParameterList or -Dict"
)
_META = (
    "a tensor on the meta device: it has no values, no load gives it any, and nobody declared it; construct it on a "
    "real device, or declare it with olq.derive"
)
_CUT = "more nested or longer than is searched: tensors in it are neither reported nor refreshed"


def _reason(place: Place) -> str:
    if place.tensor.is_meta:
        return _META
    if isinstance(place.tensor, nn.Parameter):
        return _PARAMETER
    return _HELPER.format(place.helper) if place.helper else _BARE


def _also(count: int) -> str:
    return f" (the same tensor hangs in {count} other place{'s' if count > 1 else ''})" if count else ""


def _place(path: str, holder: Any, key: Any, tensor: Tensor, helper: str) -> Place:
    version = -1 if tensor.is_inference() else tensor._version
    return Place(path, holder, key, tensor, tensor.detach(), helper, version)


def _moved(before: Mapping[str, Place], after: Mapping[str, Place]) -> list[tuple[Place, Place]]:
    """Places at which another memory hangs than before."""
    pairs = [(old, after[path]) for path, old in before.items() if path in after and _has_place(old.alias)]
    return [(old, new) for old, new in pairs if not same_memory(old.alias, new.alias)]


def _misfit(old: Place, new: Place, weights: Memory, label: str) -> LayoutError | None:
    """Why a tensor can't take the place of another, or None."""
    if facts(old.alias) != facts(new.alias):
        found, need = facts(new.alias), facts(old.alias)
        remedy = "give it one layout in all loads; captured graphs and helper objects hold the old address"
    elif new.holder is None:
        found, need = "a new tensor inside a tuple", "a place that can be written to"
        remedy = "keep it in a list, a dict or an attribute, or copy into the old tensor"
    elif not old.registered and weights.overlaps(old.alias):
        found, need = "a tensor of its own where a view of a weight was", "the same kind in all loads"
        remedy = "clone in all loads, or in none"
    else:
        return None
    return LayoutError(
        "A hook replaced a tensor by one that can't take its place.",
        where=f"{new.path}, replaced by {label}",
        found=found,
        need=need,
        remedy=remedy,
    )


def _has_place(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    return span(tensor) if tensor.numel() and tensor.layout is torch.strided else (0, 0)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) if tensor.layout is torch.strided else 0
