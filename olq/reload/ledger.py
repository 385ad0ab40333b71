"""Which tensor belongs to which parameter: found by storage, since views keep it and names change."""

from collections.abc import Iterable

from torch import Tensor

from olq.reload.progress import Progress


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage. Valid while something keeps the storage alive, on every device."""
    return tensor.untyped_storage()._cdata


class Ledger:
    """The parameters of a load, by storage.

    `data_ptr` is 0 on the meta device and ids of freed storages come back, so the ledger holds an alias of each
    parameter as it was when the load began.

    Args:
        progress: the parameters.
    """

    def __init__(self, progress: Iterable[Progress] = ()) -> None:
        self._by_storage: dict[int, list[tuple[int, int, Progress]]] = {}
        self._aliases: dict[int, Tensor] = {}
        for one in progress:
            self.add(one)

    def add(self, progress: Progress) -> None:
        """Track a parameter. A second time changes nothing."""
        if id(progress) in self._aliases:
            return
        alias = progress.parameter.detach()
        self._aliases[id(progress)] = alias
        first = last = int(alias.storage_offset())
        if alias.numel():
            last += sum((int(n) - 1) * int(s) for n, s in zip(alias.shape, alias.stride(), strict=True))
        self._by_storage.setdefault(storage_key(alias), []).append((first, last, progress))

    def find(self, tensor: Tensor) -> Progress | None:
        """The parameter that a view belongs to, or None."""
        found = self._by_storage.get(storage_key(tensor))
        if found is None:
            return None
        if len(found) == 1:
            return found[0][2]
        offset = tensor.storage_offset()  # several parameters in one flat buffer
        return next((one for first, last, one in found if first <= offset <= last), None)

    def alias(self, progress: Progress) -> Tensor:
        """The parameter's memory as it was when the load began."""
        return self._aliases[id(progress)]

    def moved(self, progress: Progress) -> bool:
        """Whether somebody gave the parameter other memory, as `parameter.data = x` does without any operator."""
        alias, parameter = self._aliases[id(progress)], progress.parameter
        return storage_key(alias) != storage_key(parameter) or alias.shape != parameter.shape
