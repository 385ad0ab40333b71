"""Derived tensors and hooks, run after every commit: in place, in order, attention last.

A first load and a reload run them alike. Tensors keep address, shape, strides, dtype and device from the first commit
on, those that a hook replaces included.

Order     a declaration runs after those that it reads; ties by module order, then by order of declaration; `last=True`
          after all others.
Elsewhere what is declared: `olq.reload.declarations`; tensors that nobody declared: `olq.reload.attributes`; a way
          back after a failed commit: `olq.reload.rollback`; who is told of a commit: `olq.reload.callbacks`.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from olq.alloc.memory import allocate
from olq.alloc.spec import DTYPES, TensorSpec
from olq.errors import ConfigError, LayoutError
from olq.methods.state import FORMAT_SUFFIX, find_state
from olq.patterns import join
from olq.reload import attributes
from olq.reload.attributes import Memory, facts, find_all, own_tensors, same_memory, write
from olq.reload.callbacks import Handle, on_commit, run_callbacks
from olq.reload.declarations import (
    Declaration,
    Hook,
    after_load,
    check_name,
    declarations,
    declared,
    derive,
    find_home,
    hook_name,
    move_home,
)
from olq.reload.rollback import Snapshot, snapshot
from olq.reload.tree import Tree

__all__ = [
    "Handle",
    "Refreshed",
    "Snapshot",
    "after_load",
    "declared",
    "derive",
    "on_commit",
    "refresh",
    "run_callbacks",
    "snapshot",
    "undeclared",
]


@dataclass(frozen=True)
class Refreshed:
    """What a refresh did.

    Args:
        refreshed: full names of derived tensors and hooks, in the order in which they ran.
        skipped: those whose reads did not change in a partial load.
    """

    refreshed: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Node:
    """A declaration in a model."""

    module: nn.Module
    label: str
    declaration: Declaration
    key: tuple[bool, int]
    needs: list["_Node"] = field(default_factory=list)
    modules: set[nn.Module] = field(default_factory=set)

    def __lt__(self, other: "_Node") -> bool:
        return self.key < other.key


def refresh(
    model: nn.Module, changed: Iterable[nn.Module] | None = None, *, hooks_only: bool = False
) -> Refreshed:
    """Compute derived tensors and run hooks, after weights have changed. Once each, in order, in place.

    Args:
        model: whose.
        changed: modules whose own weights changed. Modules that share memory with them count too, and so does what was
            refreshed for those that read it. None stands for all. What has never run is run in any case.
        hooks_only: leave derived tensors as they are: their bytes have been put back.

    Returns:
        What ran and what did not.

    Raises:
        ConfigError: reads go in a circle, or lead to something that is not in the model or not declared.
        LayoutError: a tensor that was computed can't take the place of the one that is there.
        Exception: whatever a function raises, with a note that names it. What ran before it is refreshed.

    Peak memory: one derived tensor twice.
    """
    tree = Tree(model)
    nodes = _in_order(_collect(tree.modules))
    if not nodes:
        return Refreshed((), ())
    dirty = None if changed is None else _with_sharers(tree.modules, set(changed))
    weights = Memory(
        tree.modules, [(one.module, one.declaration.name) for one in nodes if not one.declaration.hook]
    )
    ran: dict[_Node, None] = {}
    skipped: list[str] = []
    for node in nodes:
        if hooks_only and not node.declaration.hook:
            continue
        due = dirty is None or not node.declaration.done or bool(node.modules & dirty)
        if not due and ran.keys().isdisjoint(node.needs):
            skipped.append(node.label)
            continue
        try:
            (_run_hook if node.declaration.hook else _compute)(node, weights)
        except BaseException as error:
            kind = "the hook" if node.declaration.hook else "the derived tensor"
            error.add_note(f"olq was refreshing {kind} {node.label!r} of a {type(node.module).__name__}")
            raise
        node.declaration.done = True
        ran[node] = None
    return Refreshed(tuple(node.label for node in ran), tuple(skipped))


def undeclared(tree: Tree) -> dict[str, str]:
    """Tensors outside parameters and buffers that no load writes and nobody declared.

    Looked through: attributes, lists, tuples, dicts, `functools.partial`, and one level of plain helper objects. Left
    out: derived tensors, what a hook was seen to write, and what shares memory with a parameter, buffer, kernel tensor
    or one of these, since it shows new values by itself.

    Returns:
        Full name to the reason, in words. Tensors on the meta device have a reason of their own.
    """
    covered = {
        join(prefix, name)
        for module, prefix in tree.modules.items()
        for one in declarations(module)
        for name in (one.wrote if one.hook else (one.name,))
    }
    return attributes.undeclared(tree, covered)


def _compute(node: _Node, weights: Memory) -> None:
    module, name = node.module, node.declaration.name
    check_name(module, name)
    home = find_home(module, name)
    live = None if home is None or home[name].is_meta else home[name]
    with torch.inference_mode(False), torch.no_grad():
        try:
            result = node.declaration.run(module)
        finally:
            if live is not None:  # the function may have assigned it as well
                move_home(module, name, home, live)
        if not isinstance(result, Tensor) or result.is_meta or result.layout is not torch.strided:
            found = facts(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
            need = "a strided tensor with memory"
            raise _layout_error(
                node, found, need, "return the values as a plain tensor on the weights' device"
            )
        result = result.detach()
        if live is None:
            move_home(module, name, None, _copy(result, node.label))
            return
    if same_memory(result, live.detach()):
        return  # a view of a weight, or written by the function itself
    _check_target(node, live, result, weights)
    if attributes.key_of(result) == attributes.key_of(live):
        result = result.clone()
    write(live, result)


def _check_target(node: _Node, live: Tensor, result: Tensor, weights: Memory) -> None:
    """Raise `LayoutError` unless the values can be copied into the tensor that is there."""
    need, found = ((t.shape, t.dtype, t.device) for t in (live, result))
    if found != need:
        remedy = (
            "compute the same shape and dtype in all loads; after a change captured graphs would be invalid"
        )
        if live.device != result.device:
            remedy = "register it as a buffer, so that it moves with its module"
        raise _layout_error(node, facts(result), facts(live), remedy)
    if any(n > 1 and step == 0 for n, step in zip(live.shape, live.stride(), strict=True)):
        raise _layout_error(node, facts(live), "elements with a place each", "hold it with .contiguous()")
    if weights.overlaps(live):
        raise _layout_error(
            node,
            "a tensor in the memory of a weight, which would be overwritten",
            "memory of its own, or values that are that weight's",
            "clone it where it is made, or leave the attribute out: olq makes its memory",
        )


def _copy(result: Tensor, owner: str) -> Tensor:
    """The values in memory of their own, dense, dimensions in the same order."""
    strides = torch.empty_like(result, device="meta").stride()
    if result.dtype in DTYPES:
        spec = TensorSpec(tuple(result.shape), result.dtype, strides)
        memory = allocate(spec, device=result.device, owner=owner)
    else:
        memory = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return memory.copy_(result)


def _run_hook(node: _Node, weights: Memory) -> None:
    module, declaration = node.module, node.declaration
    before = find_all(module)
    if declaration.done:
        held = before
    else:  # nobody holds an address yet, except that of kernel tensors
        kernel = _kernel_names(module)
        held = {path: place for path, place in before.items() if path in kernel}
    try:
        with torch.inference_mode(False), torch.no_grad():
            declaration.run(module)
    except BaseException:
        # Or the next load would take the new addresses for the old ones.
        attributes.put_back(held, find_all(module))
        raise
    after = find_all(module)
    declaration.wrote |= {path for path in attributes.written(before, after) if not after[path].registered}
    attributes.keep(held, after, weights, node.label)


def _kernel_names(root: nn.Module) -> set[str]:
    return {
        join(prefix, name + suffix)
        for prefix, module in root.named_modules()
        if (state := find_state(module)) is not None
        for name, plan in state.plans.items()
        for suffix in (*plan.tensors, FORMAT_SUFFIX)
    }


def _collect(names: Mapping[nn.Module, str]) -> list[_Node]:
    """Every declaration of a model's modules with what it needs."""
    nodes: list[_Node] = []
    for module, prefix in names.items():
        for one in declarations(module):
            nodes.append(_Node(module, join(prefix, one.name), one, (one.last, len(nodes))))
    by_module: dict[nn.Module, list[_Node]] = {}
    for node in nodes:
        by_module.setdefault(node.module, []).append(node)
    for node in nodes:
        for read in node.declaration.reads or (node.module,):
            module = read[0] if isinstance(read, tuple) else read
            if module not in names:
                raise ConfigError(
                    "A derived tensor reads a module that is not part of this model.",
                    where=node.label,
                    found=f"a {type(module).__name__} that model.modules() does not list",
                    need="modules of the model that is refreshed",
                    remedy="declare after the model is put together, and refresh the whole model",
                )
            if isinstance(read, tuple):
                node.needs.append(_find(node, read, by_module.get(module, []), names[module]))
            else:
                node.modules.update(read.modules())
    return nodes


def _find(node: _Node, read: tuple[nn.Module, str | Hook], here: list[_Node], prefix: str) -> _Node:
    """The declaration that a pair in `reads` means."""
    wanted = read[1]
    for one in here:
        if (one.declaration.name if isinstance(wanted, str) else one.declaration.run) == wanted:
            if one.declaration.last and not node.declaration.last:
                raise ConfigError(
                    "A derived tensor reads one that runs last, and is not last itself.",
                    where=node.label,
                    found=f"reads {one.label}, which has last=True",
                    need="reads that can run before it",
                    remedy="give it last=True as well",
                )
            return one
    raise ConfigError(
        "A derived tensor reads one that nobody declared.",
        where=node.label,
        found=f"{join(prefix, wanted if isinstance(wanted, str) else hook_name(wanted))} in reads",
        need=f"one of {', '.join(one.label for one in here) or 'its declarations, of which there are none'}",
        remedy="declare it with olq.derive or olq.after_load; to depend on a weight, name its module",
    )


def _in_order(nodes: list[_Node]) -> list[_Node]:
    """Each after what it needs; among those that may run, the least key first."""
    waiting = {node: len(set(node.needs)) for node in nodes}
    readers: dict[_Node, list[_Node]] = {node: [] for node in nodes}
    for node in nodes:
        for need in set(node.needs):
            readers[need].append(node)
    ready = [node for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    ordered: list[_Node] = []
    while ready:
        ordered.append(node := heapq.heappop(ready))
        for reader in readers[node]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(nodes):
        raise _circle(next(node for node in nodes if waiting[node]), waiting)
    return ordered


def _circle(node: _Node, waiting: dict[_Node, int]) -> ConfigError:
    path: list[_Node] = []
    while node not in path:
        path.append(node)
        node = next(need for need in node.needs if waiting[need])
    circle = [*path[path.index(node) :], node]
    return ConfigError(
        "Derived tensors read each other in a circle.",
        where=node.label,
        found=" reads ".join(one.label for one in circle),
        need="an order in which each can be computed from those before it",
        remedy="take one of these out of the other's reads, or compute both in one hook",
    )


def _with_sharers(modules: Iterable[nn.Module], changed: set[nn.Module]) -> set[nn.Module]:
    """The modules that changed, and those that hold the same memory: tied weights."""
    written = Memory(())
    for module in changed:
        for _, tensor in own_tensors(module):
            written.add(tensor)
    return changed | {module for module in modules if any(written.shares(t) for _, t in own_tensors(module))}


def _layout_error(node: _Node, found: str, need: str, remedy: str) -> LayoutError:
    return LayoutError(
        "A derived tensor can't be refreshed in place.",
        where=f"{node.label} of a {type(node.module).__name__}",
        found=found,
        need=need,
        remedy=remedy,
    )
