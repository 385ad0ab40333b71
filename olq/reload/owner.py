"""Who loads a model: one session at a time, and a way past those that nobody will go on with.

A session makes way for the next one if nothing has arrived in it; so does one that was dropped without a commit or an
abort, which then counts as aborted. Any other is in the way until it ends.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from olq.methods.state import ATTRIBUTE, LayerState
from olq.reload import commit, online
from olq.reload.names import Names
from olq.reload.refusals import open_already
from olq.reload.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from olq.reload.session import Session

#: Attribute of a model that is being loaded: its `Owner`.
OWNER = "quant_session"


@dataclass(eq=False)
class Owner:
    """A session that has opened a model's layers. Copies and pickles of a model have none.

    Args:
        session: gives the session, or None when it is gone.
        model: its model.
        names: what it loads.
        shadow: whether it writes beside the live weights.
    """

    session: "Callable[[], Session | None]"
    model: nn.Module
    names: Names
    shadow: bool

    @property
    def started(self) -> bool:
        """Whether anything has arrived."""
        return bool(commit.arrived(self.names))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model is nobody's."""
        return

    def __reduce__(self) -> Any:
        return (type(None), ())


def take(session: "Session", *, shadow: bool) -> None:
    """Note that a session has opened its layers."""
    owner = Owner(weakref.ref(session), session.model, session.names, shadow)
    session.model.__dict__[OWNER] = owner
    for layer in session.names.layers.values():
        state: LayerState = layer.__dict__[ATTRIBUTE]
        if state.open is None:
            state.owner, state.held = owner, "a load that is open"
        else:
            state.open.owner = owner


def release(session: "Session") -> None:
    """Note that a session has ended."""
    owner = session.model.__dict__.get(OWNER)
    if owner is not None and owner.session() is session:
        del session.model.__dict__[OWNER]
    for load in session.names.loads.values():
        load.owner = None  # or they would hold each other


def make_way(tree: Tree) -> None:
    """End open loads in which nothing has arrived, or whose session is gone: nothing is lost by that.

    Args:
        tree: of a model that may share modules with others, whose loads count as well.

    Raises:
        StateError: something has arrived in a load that may still go on.
    """
    model = tree.model
    layers = [one for one in tree.layers if one[2].open is not None]
    found = [
        *[state.open.owner for _, _, state in layers],
        *[state.owner for _, _, state in tree.layers if state.owner is not None],
        model.__dict__.get(OWNER),
    ]
    owners = {id(one): one for one in found if one is not None}
    for name, _, state in layers:
        if state.open.owner is None and state.open.started:
            raise open_already(name or type(model).__name__)
    for owner in owners.values():
        if owner.session() is not None and (arrived := commit.arrived(owner.names)):
            raise open_already(arrived[0])
    for owner in owners.values():
        session = owner.session()
        if session is not None:
            session.abort()
            continue
        owner.model.__dict__.pop(OWNER, None)
        commit.give_up(owner.model, owner.names, commit.touched(owner.names), shadow=owner.shadow)
    for _, layer, state in layers:
        online.abort(layer, untouched=True, why=state.held)


def undo(tree: Tree, meter: object) -> None:
    """Close the layers that a session had opened before its begin failed.

    Args:
        tree: of the session's model.
        meter: of its loads.
    """
    for _, layer, state in tree.layers:
        if state.open is not None and state.open.meter is meter:
            online.abort(layer, untouched=True, why=state.held)
