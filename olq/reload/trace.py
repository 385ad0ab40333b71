"""What a loader call did with one fed tensor, so that it can be done again without the loader."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from olq.reload.progress import Progress
    from olq.reload.region import Box


class Trace:
    """What one loader call handed over, for a plan that repeats it.

    Attributes:
        arrivals: (parameter, box, source), or None for a source where the values did not come by a plain copy.
        computed: whether the loader ran any operator beside views and copies onto parameters.
    """

    def __init__(self) -> None:
        self.arrivals: list[tuple[Progress, Box, Tensor | None]] = []
        self.computed = False
