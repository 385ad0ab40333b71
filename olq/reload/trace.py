"""What a loader call did with one fed tensor, so that it can be done again without the loader."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from olq.reload.counter import CopyCounter
    from olq.reload.progress import Progress
    from olq.reload.region import Box


#: What shows a tensor's values to code that no dispatch mode sees. Not `data_ptr`: olq itself compares addresses.
_LOOKS = frozenset(
    getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")
)


class Looks(TorchFunctionMode):
    """Notes that a loader looked at values past the dispatcher: its next tensor may need other copies.

    Args:
        counter: has the trace of the loader that runs.
    """

    def __init__(self, counter: "CopyCounter") -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and remember if it is one of those."""
        if self._counter.trace is not None and func in _LOOKS:
            self._counter.trace.computed = True
        return func(*args, **(kwargs or {}))


class Trace:
    """What one loader call handed over, for a plan that repeats it.

    Attributes:
        arrivals: (parameter, box, source), or None for a source where the values did not come by a plain copy.
        computed: whether the loader ran any operator beside views and copies onto parameters.
    """

    def __init__(self) -> None:
        self.arrivals: list[tuple[Progress, Box, Tensor | None]] = []
        self.computed = False
