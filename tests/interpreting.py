"""Triton's interpreter without what takes a quarter of its time: to patch its language anew for each device function.

A kernel that runs has the language patched for all that it calls, and the first call of Triton's own functions patches
the module that these see; from then on nothing changes by it. Loaded by conftest.py; does nothing where Triton
compiles.
"""

import os
from typing import Any


def _patch_once() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    patching = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = (module for module in self.fn.__globals__.values() if module is tl or module is tl.core)
        if any(tl.core.is_builtin(module.load) for module in seen):  # not patched
            return patching(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_once()
