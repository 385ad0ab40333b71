"""Of targets that are not met, or so closely that a run may miss them: what profiles say, what was tried, the best.

For the page. Tuning runs are not kept among the results.
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
        "read first marked as what the cache may lose (each kept, together 3 us), half as many programs (0.905), the "
        "second sweep's reads marked too, 24 and 40 MiB kept for it instead of 32 (no difference). When the two "
        "quantizing kernels were timed by themselves, the marks saved 5 us, which would give 0.92; quantizing and "
        "product together take as long with them. A maximum from the layer in front would save a read.",
    ),
    Reason(
        "linear_gpu",
        {"case": "fp8 channel", "rows_of_x": 16},
        "An earlier kernel, of 4 warps, whose loop took two steps and read the last one twice, took 19 us in tuning "
        "runs where this one takes 19.7; from 32 to 256 rows this one is faster.",
    ),
    Reason(
        "linear_gpu",
        {"case": "mxfp8", "rows_of_x": 16},
        "Nsight Compute: warps wait for codes a third of the time and for each other at a step's two barriers a fifth; "
        "adding the shares takes 1.2 us. Tried: 4, 8 and 16 warps, 2 to 8 shares, steps of 64 to 512 columns, one to "
        "four products between barriers, codes asked for before and after decoding, x and scales two steps ahead, 80 "
        "to 160 registers, scales prefetched, x by asynchronous copies. Best: 0.80, in runs by itself.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 16},
        "36 MiB take 9 us at the rate of a copy, 14 are allowed. The second kernel takes 1.2 us of 16; for 14 "
        "Nsight Compute sees multiprocessors at work, their issue slots 55 %, integer units 51 %, L1 pipe 56 %, and "
        "DRAM 60 %. Warps wait for x (a fifth of the time), codes and barriers by turns: what "
        "shortened one wait made another longer. Tried: x two steps ahead, one to four products between barriers, 64 "
        "to 256 rows a program, 2 and 4 shares, 96 to 190 registers, prefetching codes into the L2 cache one to four "
        "steps ahead or before the launch's wait, all of a step decoded at once, x by asynchronous copies (4.3 "
        "instead of 3.0 instructions a code). Not tried: the last program of a band adds the shares, which needs "
        "counters that are zero, and no two streams could share them.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 1},
        "36 MiB take 9 us at the rate of a copy. Nsight Compute: issue slots 62 % and integer units 63 % of the time "
        "that multiprocessors work: two integer operations decode two codes at half rate, and each warp reads and "
        "permutes x. Tried: about 50 divisions among warps, codes and x a step or two ahead, bodies of two steps, 64 "
        "to 128 registers, prefetching 1 to 8 steps into the L2 cache, letting the next launch start earlier.",
    ),
)


def reason_of(target: Target) -> str | None:
    """The first reason that is about a target."""
    for one in REASONS:
        if one.benchmark == target.benchmark and all(target.where.get(k) == v for k, v in one.where.items()):
            return one.text
    return None
