"""A kernel that holds multiprocessors for a while. Imports triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def hold(taken, nanoseconds):
    """Of each program: how long it ran, at least so long."""
    first = globaltimer()
    now = first
    while now - first < nanoseconds:
        now = globaltimer()
    tl.store(taken + tl.program_id(0), now - first)
