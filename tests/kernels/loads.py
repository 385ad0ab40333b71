"""Triton's interpreter, with its loads shown to a test."""

from collections.abc import Callable
from typing import Any

import pytest


def show_loads(monkeypatch: pytest.MonkeyPatch, shown: Callable[[Any, Any], object]) -> None:
    """Call `shown` with the interpreter's handles of pointers and of the mask, before each load of a kernel."""
    builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    load = builder.create_masked_load

    def first_show(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        shown(pointers, mask)
        return load(self, pointers, mask, *rest, **more)

    monkeypatch.setattr(builder, "create_masked_load", first_show)
