"""For whoever writes a method or an engine: a conformance suite, awkward weights and orders, poison, a memory meter.

Nothing is imported before it is asked for: `olq.testing.memory` works without pytest and hypothesis.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olq.testing.conformance import MethodConformance as MethodConformance

__all__ = ["MethodConformance"]


def __getattr__(name: str) -> Any:
    if name == "MethodConformance":
        from olq.testing.conformance import MethodConformance

        return MethodConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
