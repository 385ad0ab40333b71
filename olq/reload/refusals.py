"""What to raise when a loader, or a second load, does what can't be served."""

from torch import Tensor

from olq.errors import LoaderError, SourceError, StateError


def refusal(found: str, where: str, name: str) -> LoaderError:
    """The error for a loader that does something else than plain copies.

    Args:
        found: what it does, in words.
        where: the parameter.
        name: what is being loaded.
    """
    return LoaderError(
        "A weight loader does something that can't be served without guessing.",
        where=f"{where}, while loading {name!r}",
        found=f"the loader {found}",
        need="plain copies into slices of the parameter, from tensors that have values",
        remedy="transform the source before copying it, or list the layer under `keep`",
    )


def wrong_shape(label: str, name: str, target: Tensor, source: Tensor) -> SourceError:
    """The error for a source that does not broadcast to its target."""
    return SourceError(
        "A tensor does not fit the place that it is copied to.",
        where=f"{label}, from {name!r}",
        found=f"a source of shape {list(source.shape)}, {source.dtype}",
        need=f"shape {list(target.shape)}, or one that broadcasts to it",
        remedy="check that checkpoint and model agree, and that the loader slices both alike",
    )


def check_memory(source: Tensor, label: str, name: str) -> None:
    """Raise if a loader freed a source after copying from it: the copy was still to be taken."""
    if source.numel() and not source.untyped_storage().nbytes():
        raise LoaderError(
            "A source was freed before its loader returned.",
            where=f"{label}, while loading {name!r}",
            found="a source whose storage was resized to nothing",
            need="sources that keep their memory until the loader returns",
            remedy="free the source after the loader has returned",
        )


def open_already(where: str) -> StateError:
    """The error for a load that begins while another one of the same layers goes on."""
    return StateError(
        "A load of this model is open already.",
        where=where,
        found="something that has arrived in a load that is not committed",
        need="one load at a time",
        remedy="finalize or abort the other load first",
    )
