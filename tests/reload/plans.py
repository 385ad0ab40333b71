"""Write plans and layers that several test modules share."""

from collections.abc import Iterator
from itertools import pairwise

import olq
from olq.reload.region import Box
from olq.testing import layers
from olq.testing.layers import kernel_bytes, load_by
from olq.testing.strategies import bf16_weights, partitions

__all__ = [
    "METHODS",
    "RegionLayer",
    "bf16_weights",
    "kernel_bytes",
    "load_by",
    "method_id",
    "partitions",
    "row_boxes",
]

#: Every built-in method with parameters that change units, scales or layouts.
METHODS: list[tuple[str, dict[str, str]]] = [
    ("fp8", {"granularity": "tensor"}),
    ("fp8", {"granularity": "tensor", "scale_sharing": "common"}),
    ("fp8", {"granularity": "channel"}),
    ("fp8", {"granularity": "block"}),
    ("fp8", {"granularity": "block", "scale": "power_of_two"}),
    ("mxfp8", {}),
    ("mxfp8", {"rule": "FLOOR", "scale_layout": "swizzled_128x4"}),
    ("nvfp4", {}),
    ("nvfp4", {"scale_sharing": "common", "scale_layout": "swizzled_128x4"}),
]


def method_id(value: tuple[str, dict[str, str]]) -> str:
    """A readable test id."""
    name, params = value
    return "-".join([name, *params.values()])


class RegionLayer(layers.RegionLayer):
    """The public one, made from a name and parameters."""

    def __init__(
        self, method: str, params: dict[str, str], parts: tuple[int, ...], columns: int, lead=()
    ) -> None:
        super().__init__(olq.get_method(method, **params), parts, columns, lead)


def row_boxes(parts: tuple[int, ...], columns: int) -> Iterator[Box]:
    """One box a part, as checkpoints store them."""
    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]
    for start, stop in pairwise(ends):
        yield range(start, stop), range(columns)
