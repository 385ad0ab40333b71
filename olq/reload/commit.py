"""How a load ends for the model as a whole: it goes live, or back to what it was, or says that it can't be called."""

from dataclasses import replace

from torch import nn

from olq.errors import StateError
from olq.methods.state import state_of
from olq.patterns import join
from olq.reload import derived, online
from olq.reload.accounting import first
from olq.reload.declarations import declares
from olq.reload.names import Names
from olq.reload.progress import PlainParameter
from olq.reload.shadow import Shadow
from olq.reload.tree import Tree, layers_of
from olq.report import Report


def need_servable(tree: Tree, what: str) -> None:
    """Raise `StateError` unless every layer can be called.

    Args:
        tree: of any model.
        what: what needs that, in words.
    """
    dead = [(name, state) for name, _, state in tree.layers if not state.installed or state.held]
    if dead:
        raise StateError(
            f"{what[0].upper()}{what[1:]} needs a model that can be called.",
            where=first([name or type(tree.model).__name__ for name, _ in dead], 3),
            found=dead[0][1].held or "layers without weights, or with an open load",
            need="a live model",
            remedy="load everything in place: olq.load(model, weights)",
        )


def hold(tree: Tree, why: str) -> None:
    """Keep layers that stay as they are from being called while others of their model are loaded."""
    for _, _, state in tree.layers:
        if state.installed and state.owner is None:
            state.held = why


def watch(names: Names, *, shadow: bool) -> None:
    """Let quantized weights count what the load changes."""
    for layer in names.layers.values():
        state = state_of(layer)
        for name, weight in state.open.weights.items():
            if state.kernel:
                live = {suffix: state.kernel[name + suffix] for suffix in weight.plan.tensors}
                weight.watch(live, copy=not shadow)


def go_live(tree: Tree, names: Names, report: Report, *, shadow: bool, partial: bool) -> Report:
    """Install what a complete load has brought, then refresh what is derived from it.

    Args:
        tree: of the model.
        names: its layers are open and complete.
        report: of the load so far.
        shadow: the new bytes stand beside the live ones.
        partial: only a part of the model was loaded.

    Returns:
        The report with what was refreshed, and what then hangs on modules undeclared.

    Raises:
        StateError: a layer's load is another session's, which writes beside the live weights; nothing has happened.
        Exception: of a derived tensor or a hook. A shadow load has been taken back then, bit for bit; after a load in
            place no layer can be called.
    """
    model = tree.model
    repeat = names.repeat
    for name, layer in names.layers.items() if repeat is None else ():
        if online.load_of(layer).shadow and not shadow:
            raise StateError(
                "A shadow load can be ended by its session only.",
                where=name or type(model).__name__,
                found="new bytes that stand beside the live ones",
                need="the session's own commit, which copies them into the live addresses",
                remedy="call session.commit() instead of finalize_layerwise_processing(model)",
            )
    anything = declares(tree)
    keep_old = shadow and anything
    before = derived.snapshot(model) if keep_old else None
    waiting = None
    if shadow:
        plains = [one for one in names.plain.values() if isinstance(one, PlainParameter)]
        waiting = Shadow(names.layers.values(), plains)
        waiting.put(keep_old=keep_old)
    names.ended = True
    if repeat is not None:
        repeat.commit()
    else:
        for layer in names.layers.values():
            online.install(layer)
    for _, _, state in tree.layers:
        state.held = ""
    if not anything:
        return report
    changed = None
    if partial:
        changed = {model.get_submodule(one.label.rpartition(".")[0]) for one in names.progress}
    try:
        refreshed = derived.refresh(model, changed)
    except BaseException as error:
        if waiting is not None and before is not None:
            waiting.undo()
            before.restore()
            _refresh_again(model, error)
        else:
            _retire(
                model,
                f"weights whose derived tensors could not be refreshed: {type(error).__name__}: {error}",
            )
        for layer in names.layers.values():
            state_of(layer).generation -= 1
        raise
    return replace(report, derived=refreshed.refreshed, undeclared=derived.undeclared(Tree(model)))


def _refresh_again(model: nn.Module, error: BaseException) -> None:
    """Let hooks see the old weights again: what they keep besides tensors has no other way back."""
    try:
        derived.refresh(model, hooks_only=True)
    except Exception as again:
        why = f"old weights whose hooks fail on them too: {type(again).__name__}: {again}"
        error.add_note(
            f"olq: the old weights are back, but hooks failed on them too ({again!r}); nothing is served"
        )
        _retire(model, why)


def touched(names: Names) -> tuple[str, ...]:
    """Parameters, and kernel tensors of a saved model, that a load has written or begun to write."""
    if (repeat := names.repeat) is not None:
        return (*repeat.touched, *(one.label for one in names.plain.values() if one.touched))
    restored = {
        join(name, tensor)
        for name, layer in names.layers.items()
        for tensor in getattr(online.load_of(layer), "restored", ())
    }
    return (*(one.label for one in names.progress if one.touched), *sorted(restored))


def arrived(names: Names) -> tuple[str, ...]:
    """What has arrived in a load, or was written; an empty parameter never does."""
    if names.repeat is not None:
        return (*touched(names), *(one.label for one in names.plain.values() if one.arrivals))
    return (*(one.label for one in names.progress if one.arrivals), *touched(names))


def give_up(model: nn.Module, names: Names, touched: tuple[str, ...], *, shadow: bool) -> None:
    """End a load without a commit.

    Args:
        model: of the load.
        names: its layers are open.
        touched: parameters that the load has written.
        shadow: it wrote beside the live ones.
    """
    names.ended = True
    if names.repeat is not None:
        names.repeat.drop()
    intact = shadow or not touched
    why = f"weights whose load failed, after it had written {len(touched)} parameters: {first(touched, 5)}"
    opened = set(names.layers.values()) if names.repeat is None else set()
    for layer in names.layers.values():
        state = state_of(layer)
        state.owner = None
        if names.repeat is not None and not intact:  # its kernel tensors must not pass for weights
            state.held = ""
            online.open_layer(layer)
        online.abort(layer, untouched=intact, why=why if touched else "")
    for _, layer, state in layers_of(model):
        if layer not in opened and state.installed:
            state.held = "" if intact else why


def _retire(model: nn.Module, why: str) -> None:
    """Make every layer refuse calls until a load of everything commits; kernel tensors keep their addresses."""
    for _, layer, state in layers_of(model):
        state.made.clear()
        online.open_layer(layer)
        online.abort(layer, why=why)


def changes(names: Names) -> dict[str, tuple[int, int]]:
    """By weight: bytes of codes and scales that the load changed, where that was watched."""
    if names.repeat is not None:  # which begins only where nothing is watched
        return {}
    return {one.label: found for one in names.weights if (found := one.changes()) is not None}
