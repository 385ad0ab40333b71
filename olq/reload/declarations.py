"""How an engine says what is derived from what: `derive` for a tensor, `after_load` for a hook.

Declarations are kept on the module that they are about, in `vars(module)["quant_derived"]`. Copies and pickles of a
model carry them, referring to the copied modules; there is no registry beside the model. `olq.reload.derived` runs
them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from olq.errors import ConfigError
from olq.methods.state import FORMAT_SUFFIX, find_state
from olq.patterns import join
from olq.reload.tree import Tree

#: Name in `vars(module)` of the list of its declarations.
ATTRIBUTE = "quant_derived"

#: Gives a tensor's values from the module that holds it.
Compute = Callable[[Any], Tensor]
#: Called with the module after each commit.
Hook = Callable[[Any], object]
#: A module whose weights are read; or what else is read: (module, name of a derived tensor) or (module, hook).
Read = nn.Module | tuple[nn.Module, str | Hook]


@dataclass(eq=False)
class Declaration:
    """One derived tensor or hook.

    Args:
        name: of the tensor; of a hook its function's name with "()".
        run: computes the values, or is the hook.
        hook: whether it is a hook.
        reads: what it depends on; empty stands for its module and that one's descendants.
        last: runs after all that are not.
        done: a commit has run it.
        wrote: names, below the module, of tensors that the hook wrote.
    """

    name: str
    run: Callable[[Any], Any]
    hook: bool
    reads: tuple[Read, ...]
    last: bool
    done: bool = False
    wrote: set[str] = field(default_factory=set)


def derive(
    module: nn.Module, name: str, compute: Compute, *, reads: Sequence[Read] = (), last: bool = False
) -> None:
    """Declare that `module.<name>` is computed from weights.

    A tensor of that name with memory of its own (parameter, buffer or plain attribute) is written in place from the
    first commit on. Without one, or with one on the meta device, the first commit registers a non-persistent buffer.

    Args:
        module: holds the tensor.
        name: the attribute.
        compute: called with the module, without grad; gives the values in new memory or in any other: they are copied.
            It may call `olq.dequantize`. A function of a module, a method or a partial, if the model is to be pickled.
        reads: modules whose weights (their descendants' included) it depends on, and other derived tensors as (module,
            name) or hooks as (module, hook). Empty: `module` and its descendants.
        last: after all that are not last; for attention, which engines process when everything else is done.

    Raises:
        ConfigError: the name is declared already, belongs to a quantized weight, or can't be an attribute.
    """
    check_name(module, name)
    if any(one.name == name for one in declarations(module)):
        raise _twice(module, f"the tensor {name!r}")
    _add(module, Declaration(name, compute, False, tuple(reads), last))


def after_load(module: nn.Module, hook: Hook, *, reads: Sequence[Read] = (), last: bool = False) -> None:
    """Declare a function to be called with `module` whenever weights have been committed.

    For helper objects that captured a scale or a workspace, post-load steps of modules without a method, and caches
    that have to be dropped. Tensors of the module and its descendants that the hook replaces, in helper objects too,
    get the new values at their old addresses from its second run on.

    Args:
        module: given to the hook.
        hook: must give the same result however often it has run before: it reads weights, not its own output.
        reads: as for `derive`.
        last: as for `derive`.

    Raises:
        ConfigError: the hook is declared already.
    """
    here = declarations(module)
    if any(one.hook and one.run == hook for one in here):
        raise _twice(module, f"the hook {hook_name(hook)}")
    name = hook_name(hook)
    taken = sum(one.hook and one.name.partition("#")[0] == name for one in here)
    _add(module, Declaration(f"{name}#{taken + 1}" if taken else name, hook, True, tuple(reads), last))


def declarations(module: nn.Module) -> list[Declaration]:
    """What is declared on the module itself, in order."""
    return module.__dict__.get(ATTRIBUTE, [])


def declares(tree: Tree) -> bool:
    """Whether anything is declared on a model's modules."""
    return any(True for _ in tree.notes(ATTRIBUTE))


def declared(tree: Tree) -> set[str]:
    """Full names of all derived tensors, under every name of their modules, whether they exist yet or not."""
    return {
        join(prefix, one.name)
        for prefix, module in tree.named
        for one in module.__dict__.get(ATTRIBUTE, ())
        if not one.hook
    }


def find_home(module: nn.Module, name: str) -> dict[str, Any] | None:
    """The dict that holds the tensor of that name: of parameters, buffers or attributes; None if there is no tensor."""
    for home in _homes(module):
        if isinstance(home.get(name), Tensor):
            return home
    return None


def move_home(module: nn.Module, name: str, home: dict[str, Any] | None, tensor: Tensor | None) -> None:
    """Put a tensor where `find_home` found it, and nowhere else.

    Args:
        module: holds it.
        name: the attribute.
        home: where; None makes it a non-persistent buffer.
        tensor: what; None removes it.
    """
    for other in _homes(module):
        if other is not home or tensor is None:
            other.pop(name, None)
    if tensor is None or home is None:
        module._non_persistent_buffers_set.discard(name)
    if tensor is not None and home is None:
        module.register_buffer(name, tensor, persistent=False)
    elif tensor is not None and home is not None and home.get(name) is not tensor:
        home[name] = tensor


def _homes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers, vars(module)))


def _add(module: nn.Module, one: Declaration) -> None:
    module.__dict__.setdefault(ATTRIBUTE, []).append(one)


def check_name(module: nn.Module, name: str) -> None:
    """Raise `ConfigError` if the module can't hold a derived tensor of that name."""
    state = find_state(module)
    value = vars(module).get(name)
    found = need = ""
    if not name or "." in name:
        found, need = repr(name), "one attribute's name without a dot; the module that holds it comes first"
    elif name in module._modules or (value is not None and not isinstance(value, Tensor)):
        found, need = f"a {type(getattr(module, name)).__name__} of that name", "a tensor, or nothing"
    elif hasattr(type(module), name) and (value is None or value.is_meta):
        found, need = (
            "a class attribute of that name, which hides buffers",
            "a name that the class does not use",
        )
    elif state is not None and any(name in (*_suffixed(w, p), w) for w, p in state.plans.items()):
        found, need = "a tensor of a quantized weight", "a name of its own"
    if found:
        raise ConfigError(
            "A derived tensor can't have this name.",
            where=f"{name} of a {type(module).__name__}",
            found=found,
            need=need,
            remedy="choose another name, or olq.after_load for what is not a tensor",
        )


def _suffixed(weight: str, plan: Any) -> Iterator[str]:
    return (weight + suffix for suffix in (*plan.tensors, FORMAT_SUFFIX))


def hook_name(hook: Hook) -> str:
    """What a hook is called: its function's name with "()"."""
    inner = getattr(hook, "func", hook)
    return f"{getattr(inner, '__name__', type(inner).__name__)}()"


def _twice(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        "Something is declared twice.",
        where=f"a {type(module).__name__}",
        found=f"{what}, which the module has already",
        need="one declaration for each tensor and hook",
        remedy="declare in the constructor, not in what runs again with each load",
    )
