"""Who is told that new weights are live: callbacks of a model, run after each commit."""

from collections.abc import Callable
from typing import Any

from torch import nn

from olq.report import Report

#: Name in `vars(model)` of its callbacks.
ATTRIBUTE = "quant_callbacks"

#: Called with the model and the report of the commit.
Callback = Callable[[Any, Report], object]


class Callbacks:
    """Callbacks in the order in which they were registered.

    A copy or a pickle of the model has none: they speak for what serves this very model (its captured graphs, its
    connections, its metrics), and a copy must neither tell them of its own loads nor keep them alive.
    """

    def __init__(self) -> None:
        self.by_handle: dict[Handle, Callback] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Callbacks":
        return Callbacks()

    def __reduce__(self) -> tuple[object, ...]:
        return Callbacks, ()


class Handle:
    """What `on_commit` returns."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    def remove(self) -> None:
        """Do not call it any more. A second time changes nothing."""
        self._callbacks.by_handle.pop(self, None)


def on_commit(model: nn.Module, callback: Callback) -> Handle:
    """Call `callback(model, report)` after each commit of this model, when its weights are live.

    Args:
        model: the one that loads and reloads are called with.
        callback: may raise: the others still run, and the weights stay live. Registered twice, it runs twice.

    Returns:
        A handle; `handle.remove()` ends it.
    """
    callbacks: Callbacks = model.__dict__.setdefault(ATTRIBUTE, Callbacks())
    handle = Handle(callbacks)
    callbacks.by_handle[handle] = callback
    return handle


def run_callbacks(model: nn.Module, report: Report) -> None:
    """Run all callbacks of a model, in the order of registration.

    Args:
        model: has committed.
        report: of that commit.

    Raises:
        Exception: the first that a callback raised, once all have run, with a note that the commit has happened and
            one for each further error.
    """
    callbacks: Callbacks | None = model.__dict__.get(ATTRIBUTE)
    errors: list[Exception] = []
    for callback in list(callbacks.by_handle.values()) if callbacks is not None else ():
        try:
            callback(model, report)
        except Exception as error:
            errors.append(error)
    if not errors:
        return
    first, *others = errors
    first.add_note(
        "raised by an on_commit callback of olq: the commit HAS happened and the model is live; all callbacks have run"
    )
    for other in others:
        first.add_note(f"another callback raised {type(other).__name__}: {other}")
    raise first
