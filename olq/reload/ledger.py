"""Which tensor belongs to which parameter: found by storage, since views keep it and names change."""

from collections.abc import Callable, Iterable
from threading import Lock

import torch
from torch import Tensor

from olq.errors import LoaderError
from olq.reload.progress import PlainParameter, Progress
from olq.reload.quantized import QuantizedWeight
from olq.reload.views import span


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage. Valid while something keeps the storage alive, on every device."""
    return tensor.untyped_storage()._cdata


class Ledger:
    """The parameters of a load, by storage. Threads may share it.

    `data_ptr` is 0 on the meta device and ids of freed storages come back, so the ledger holds an alias of each
    parameter as it was when the load began. Load-format parameters of quantized weights keep their storage while they
    are open (assignments to their data are copies), so they need not be known before somebody asks: a load that is
    replayed never does.

    Args:
        progress: the parameters.
        later: gives quantized weights when they are needed.
    """

    def __init__(
        self, progress: Iterable[Progress] = (), later: Callable[[], Iterable[QuantizedWeight]] | None = None
    ) -> None:
        self._by_storage: dict[int, tuple[tuple[int, int, Progress], ...]] = {}
        self._aliases: dict[int, Tensor] = {}
        self._later = later
        self._lock = Lock()
        self._first: QuantizedWeight | None = None
        #: Whether writes onto some parameters go to memory beside theirs.
        self.shadowed = False
        for one in progress:
            self.add(one)

    @property
    def device(self) -> torch.device:
        """Where the first quantized weight is stored; CPU if there is none."""
        self._settle()
        return self._first.device if self._first is not None else torch.device("cpu")

    def add(self, progress: Progress) -> None:
        """Track a parameter. A second time changes nothing."""
        if id(progress) in self._aliases:
            return
        with self._lock:
            self._index(progress)

    def _index(self, progress: Progress) -> None:
        if id(progress) in self._aliases:
            return
        alias = progress.parameter.detach()
        key = storage_key(alias)
        if alias.numel():
            self._by_storage[key] = (*self._by_storage.get(key, ()), (*span(alias), progress))
        if self._first is None and isinstance(progress, QuantizedWeight):
            self._first = progress
        self.shadowed |= isinstance(progress, PlainParameter) and progress.shadowed
        self._aliases[id(progress)] = alias

    def _settle(self) -> None:
        """Take in the weights that were to be asked for later."""
        if self._later is None:
            return
        with self._lock:
            for progress in self._later() if self._later is not None else ():
                self._index(progress)
            self._later = None  # last: whoever sees it finds all of them

    def find(self, tensor: Tensor) -> tuple[Progress, ...]:
        """The parameters that a view may show elements of: one, unless several lie in one flat storage."""
        self._settle()
        found = self._by_storage.get(storage_key(tensor))
        if found is None or not tensor.numel():
            return ()
        if len(found) == 1:
            return (found[0][2],)
        first, last = span(tensor)
        return tuple(one for start, stop, one in found if start < last and first < stop)

    def redirect(self, view: Tensor) -> Tensor:
        """The same elements where a shadow load keeps them; a view of anything else is returned as it is.

        Raises:
            LoaderError: the view spans several parameters.
        """
        owners = self.find(view)
        if not any(isinstance(one, PlainParameter) and one.shadowed for one in owners):
            return view
        owner = owners[0]
        if len(owners) > 1 or not isinstance(owner, PlainParameter):
            raise LoaderError(
                "A shadow load can't write through a view that spans several parameters.",
                where=", ".join(one.label for one in owners),
                found=f"a view of shape {list(view.shape)} over {len(owners)} parameters in one storage",
                need="views of one parameter at a time",
                remedy="copy each parameter by itself, or load in place",
            )
        twin = owner.memory.view(view.dtype)
        scale = owner.parameter.element_size() / view.element_size()
        offset = view.storage_offset() - int(self.alias(owner).storage_offset() * scale)
        return twin.as_strided(view.shape, view.stride(), offset)

    def alias(self, progress: Progress) -> Tensor:
        """The parameter's memory as it was when the load began."""
        return self._aliases[id(progress)]

    def moved(self, progress: Progress) -> bool:
        """Whether somebody gave the parameter other memory, as `parameter.data = x` does without any operator."""
        alias, parameter = self._aliases[id(progress)], progress.parameter
        return (
            alias.data_ptr() != parameter.data_ptr()
            or alias.stride() != parameter.stride()
            or alias.shape != parameter.shape
            or alias.dtype != parameter.dtype
        )
