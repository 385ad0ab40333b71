"""The bytes of what is derived from weights, kept so that a failed commit can be undone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from olq.reload.attributes import Memory, find_all, same_memory, write
from olq.reload.declarations import Declaration, declarations, find_home, move_home


@dataclass(frozen=True)
class _Saved:
    """A tensor that was there: the object, its memory, a copy of what that held, and the dict that held the object."""

    tensor: Tensor
    memory: Tensor
    values: Tensor
    home: dict[str, Any] | None = None


@dataclass(frozen=True)
class Snapshot:
    """What `snapshot` found; use it once or often.

    Args:
        derived: (module, name, what was there or None).
        others: tensors that hooks take care of.
        records: declarations with their `done` and `wrote` as they were.
        nbytes: bytes that the copies take, on the device of each tensor.
    """

    derived: Sequence[tuple[nn.Module, str, _Saved | None]]
    others: Sequence[_Saved]
    records: Sequence[tuple[Declaration, bool, frozenset[str]]]
    nbytes: int

    def restore(self) -> None:
        """Write the bytes back to where they were; derived tensors that did not exist are removed again.

        Of hooks, tensors that existed are restored; numbers and objects that a hook keeps in Python are not: run the
        hooks again once the weights are back.
        """
        for module, name, saved in self.derived:
            if saved is not None:
                _write_back(saved)
                move_home(module, name, saved.home, saved.tensor)
            elif find_home(module, name) is not None:
                move_home(module, name, None, None)
        for saved in self.others:
            _write_back(saved)
        for declaration, done, wrote in self.records:
            declaration.done, declaration.wrote = done, set(wrote)


def snapshot(model: nn.Module) -> Snapshot:
    """Copy derived tensors and what hooks were seen to write, before a commit.

    Args:
        model: whose.

    Returns:
        The copies. Memory: as much as the tensors that are copied; see `Snapshot.nbytes`.
    """
    pairs = [(m, one.name) for m in model.modules() for one in declarations(m) if not one.hook]
    derived = [(module, name, _save(find_home(module, name), name)) for module, name in pairs]
    records: list[tuple[Declaration, bool, frozenset[str]]] = []
    others: dict[int, _Saved] = {}
    seen = Memory(model.modules())
    for _, _, one in derived:
        if one is not None:
            seen.add(one.memory)
    for module in model.modules():
        for one in declarations(module):
            records.append((one, one.done, frozenset(one.wrote)))
            places = find_all(module) if one.wrote else {}
            for path in one.wrote & places.keys():
                tensor = places[path].tensor
                if id(tensor) not in others and not seen.shares(tensor):
                    saved = _save({path: tensor}, path)
                    others |= {} if saved is None else {id(tensor): saved}
    copies = [*(one for _, _, one in derived if one is not None), *others.values()]
    nbytes = sum(one.values.numel() * one.values.element_size() for one in copies)
    return Snapshot(tuple(derived), tuple(others.values()), tuple(records), nbytes)


def _save(home: dict[str, Any] | None, name: str) -> _Saved | None:
    if home is None or home[name].is_meta:
        return None
    memory = home[name].detach()
    return _Saved(home[name], memory, memory.clone(), home)


def _write_back(saved: _Saved) -> None:
    write(saved.memory, saved.values)
    if not same_memory(saved.tensor, saved.memory):
        saved.tensor.data = saved.memory
