"""A kernel that holds multiprocessors for a while. Imports triton."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])
def hold(taken, nanoseconds):
    """Each program runs so long at least, and leaves how many nanoseconds it did."""
    first = globaltimer()
    now = first
    while now - first < nanoseconds:
        now = globaltimer()
    tl.store(taken + tl.program_id(0), now - first)
