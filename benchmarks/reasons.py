"""Of targets that are not met: what the profile says, what was tried, and the best that was reached. For the page.

Tuning runs are not kept among the results.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.targets import Target


@dataclass(frozen=True)
class Reason:
    """What is known about the targets of a benchmark in some cases.

    Args:
        benchmark: name.
        where: keys and values of the cases; those that a target's case has too.
        text: whole sentences.
    """

    benchmark: str
    where: Mapping[str, object]
    text: str


REASONS = (
    Reason(
        "forward_gpu",
        {"case": "tensor", "m": 4096},
        "Quantizing x by one scale reads it twice: 45 us for 64 MiB, of which reading at the rate of a copy is 16 and "
        "reading and writing 24. Tried: the second sweep from where the first ended, started while that ends, what is "
        "read first marked as what the cache may lose (each kept, together 3 us), half as many programs "
        "(0.905). When the two quantizing kernels were timed by themselves, the marks saved 5 us, which would give "
        "0.92; quantizing and product together take as long with them. A maximum from the layer in front would save "
        "a read.",
    ),
    Reason(
        "linear_gpu",
        {"case": "mxfp8", "rows_of_x": 16},
        "0.75 to 0.77 in five tuning runs with graphs of 16 products; in this row's graphs of 64, products of this "
        "kernel took 2 to 9 % longer, those of `linear_small` did not. Why is not known. Nsight Compute: issue slots "
        "45 %, L2 71 %, DRAM 62 %; warps wait for each other at the barrier of a step, and adding the shares takes 1.2 "
        "to 2 us. Tried: 4, 8 and 16 warps, 2 to 8 shares, steps of 64 to 256 columns, codes, x and scales two steps "
        "ahead, bodies of two and four steps, 80 to 128 registers, scales prefetched, x by asynchronous copies.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 16},
        "Nsight Compute: issue slots 46 %, integer units 41 %, DRAM 40 %; a quarter of the time warps wait at the "
        "barrier of a step, a quarter for loads. Tried: what is said of mxfp8, 64 to 256 rows a program, and x by "
        "asynchronous copies, for which two neighbouring codes have to stand in one register: with no "
        "fence between writing and multiplying, but "
        "with 4.3 instead of 3.4 instructions a code, and no faster. Best: 0.49, in a run by itself.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 1},
        "36 MiB take 9 us at the rate of a copy. Nsight Compute: issue slots 59 %, integer units 57 %, L1 61 %: two "
        "integer operations decode two codes at half rate, and each warp reads and permutes x. Tried: about 40 "
        "divisions among warps, codes and x a step or two ahead, bodies of two steps, 64 to 128 registers, prefetching "
        "1 to 8 steps into the L2 cache, letting the next launch start earlier.",
    ),
)


def reason_of(target: Target) -> str | None:
    """The first reason that is about a target."""
    for one in REASONS:
        if one.benchmark == target.benchmark and all(target.where.get(k) == v for k, v in one.where.items()):
            return one.text
    return None
