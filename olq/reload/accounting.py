"""Names and parameters of a load: what is checked of them, and what to raise when they do not agree."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from olq.errors import CoverageError, UnknownNameError
from olq.methods.state import FORMAT_SUFFIX
from olq.patterns import Pattern
from olq.reload import online, saved
from olq.reload.names import Names, near
from olq.reload.progress import Progress


def missing_error(
    missing: Iterable[str], progress: Iterable[Progress], surplus: Mapping[str, str]
) -> CoverageError:
    """What to raise when parameters are not complete."""
    missing, progress = list(missing), list(progress)
    arrived = sum(one.coverage.complete for one in progress)
    hint = f"; wrote nothing: {', '.join(list(surplus)[:5])}" if surplus else ""
    return CoverageError(
        f"Parameters did not arrive completely: {len(missing)} of {len(progress)}.",
        where=first(missing),
        found=f"{arrived} of {len(progress)} parameters complete{hint}",
        need="every element of every parameter",
        remedy="feed what is missing; a loader that copies in threads of its own is not seen",
    )


def first(names: Sequence[str], most: int = 10) -> str:
    """Some names of a list, and how many there are beside them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def unknown_error(names: Sequence[str], routes: Mapping[str, Any], where: str) -> UnknownNameError:
    """What to raise for names that nothing takes."""
    shown = ", ".join(repr(name) + near(name, routes) for name in names[:10])
    return UnknownNameError(
        f"{len(names)} names belong to no parameter of this model.",
        where=where,
        found=shown + (f" and {len(names) - 10} more" if len(names) > 10 else ""),
        need=f"names of the {len(routes)} parameters of the model",
        remedy="rename them before feeding, or list them under allow_surplus",
    )


def outside_error(names: Sequence[str], where: str) -> UnknownNameError:
    """What to raise for names of parameters that a partial load does not cover."""
    return UnknownNameError(
        f"{len(names)} names are outside the scope of this partial load.",
        where=where,
        found=first([repr(name) for name in names]),
        need="names that the scope covers; the other parameters keep their bytes",
        remedy="leave these tensors out of the source, or widen `scope`",
    )


def check_complete(names: Names, given: Iterable[str], where: str) -> None:
    """Raise `CoverageError` if a source lacks parameters, before anything of it is written."""
    given = set(given)
    if names.repeated_by(given):
        return
    missing = [
        one.label
        for one in names.required
        if not one.coverage.count and not given.intersection(names.names_of(one))
    ]
    if missing:
        raise CoverageError(
            f"The source lacks {len(missing)} of the {len(names.required)} parameters of this model.",
            where=where,
            found=f"{len(given)} names, but not {first(missing)}",
            need="every parameter of the model under its own name; nothing has been written yet",
            remedy="fetch the files that are missing, or check that checkpoint and model are of one kind",
        )


def check_names(names: Names, given: Sequence[str], where: str, allowed: Sequence[Pattern]) -> None:
    """Raise, before anything is written, if a source has names that nothing takes, or lacks parameters.

    Args:
        names: of the model.
        given: those of the source.
        where: the source, for messages.
        allowed: patterns of surplus names.
    """
    unknown = [
        name
        for name in given
        if not names.knows(name)
        and name not in names.saved
        and not any(pattern.match(name) is not None for pattern in allowed)
    ]
    if outside := [name for name in unknown if name in names.outside]:
        raise outside_error(outside, where=where)
    if unknown:
        raise unknown_error(unknown, names.routes, where=where)
    check_complete(names, given, where)


def check_tags(weights: Mapping[str, Any], names: Names) -> None:
    """Raise `LayoutError` if saved kernel tensors mean something else than this model stores; nothing is written."""
    for name, layer in names.saved.items():
        tag = weights.get(name) if name.endswith(FORMAT_SUFFIX) else None
        if isinstance(tag, Tensor):
            saved.check_tag(layer, name.rpartition(".")[2], tag, name)


def check_arrived(names: Names, surplus: Mapping[str, str]) -> None:
    """Raise `CoverageError` unless everything has arrived, and `LoaderError` if something was replaced meanwhile.

    Args:
        names: of the model.
        surplus: names that nothing was written for.
    """
    missing: list[str] = []
    if names.repeat is not None and names.repeat.complete:
        names.repeat.check()
        required = names.required_plain
    else:
        names.open()
        required = names.required
        for name, layer in names.layers.items():
            online.check_parameters(layer)
            if text := saved.finish_restored(online.load_of(layer), name):
                missing.append(text)
    missing += [text for one in required if (text := one.missing())]
    if missing:
        raise missing_error(missing, names.progress, surplus)
