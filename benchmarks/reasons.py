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
        "second sweep's reads marked too, 24 and 40 MiB kept for it instead of 32 (no difference). One cooperative "
        "launch for both sweeps, whose programs wait for each other in between and hold 24 MiB of x in registers "
        "meanwhile: 43.8 us by itself where these two launches took 46.5, and 0.913 where they had 0.904 in the same "
        "run, not enough to have a second way for it; with 20 MiB, and tiles not asked for ahead, it was no faster "
        "than they are. Not tried: more of x held in L1, as registers that spill. A maximum from the layer in front "
        "would save a read.",
    ),
    Reason(
        "linear_gpu",
        {"case": "fp8 channel", "rows_of_x": 16},
        "Where programs read decides: kernels that only read 64 MiB take 18.2 us with this one's programs, 128 rows "
        "and a quarter of the columns each, and 17.1 with 16 whole rows a program, as `linear_small` has; adding the "
        "shares takes 1.2. Tried, in one process with this kernel's 19.8: 4 warps, two steps a body, the last step "
        "read twice (20.1 to 20.6), steps of 256 columns (19.6 to 20.3), codes two steps ahead (21.0), by "
        "asynchronous copies (33), by TMA (21.5).",
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
        "36 MiB take 9 us at the rate of a copy, 14 are allowed, 15.5 are taken. Kernels that leave something out say "
        "where: 4 to 5 us do not depend on the columns (two launches, addresses, the first reads, the sums); each of "
        "8 steps of 256 columns takes 1.46. Of a step the tensor cores take 0.64, twice what these multiplications "
        "need at their peak rate; decoding adds 0.45 and x 0.1, so that 14.1 us remain where no weights are read, and "
        "11.3 where they are read but neither decoded nor multiplied with new x. Nsight Compute: issue slots 55 %, "
        "integer units 51 %, L1 pipe 56 %, DRAM 60 %. Reading and computing overlap by half, and what read earlier or "
        "deeper was slower: codes by asynchronous copies in 2 to 5 stages (27 us), by TMA (17.5), in registers two "
        "steps ahead (18.3), brought into the L2 cache by bulk prefetches of 128 to 1024 bytes a row (18 to 20), "
        "scales and the sums' scales asked for before the first step (16.3). Also tried: bodies of two steps (16.4), "
        "weights decoded a product ahead (20.7: Triton sends them through shared memory), x two steps ahead, one to "
        "four products between barriers, 64 to 256 rows a program, 2 to 8 shares, 64 to 190 registers, all of a step "
        "decoded at once. Kept: nothing asked for before the launch's wait, and 512 columns a program where shares "
        "are added (16.1 to 15.5). Not tried: products that run while the next weights are decoded, with x laid down "
        "once, which Triton's language can't say and Gluon's can; the last program of a band adds the shares, which "
        "needs counters that are zero, and no two streams could share them.",
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
