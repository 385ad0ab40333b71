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
        text: whole sentences, with empty lines between paragraphs.
    """

    benchmark: str
    where: Mapping[str, object]
    text: str


REASONS = (
    Reason(
        "forward_gpu",
        {"case": "tensor", "m": 4096},
        "Quantizing x by one scale reads it twice. 38 us are allowed for 64 MiB; at the rate of a copy reading takes "
        "16 and reading and writing 24, so that some of it has to stay in registers or L2. Two launches took 46 to 48 "
        "us, and the layer had 0.903 to 0.908; one cooperative launch takes 34 to 36 by itself: its programs hold 21 "
        "MiB in registers, wait for each other, and read the rest again. With it the layer had 0.924 to 0.927 in five "
        "processes (docs/design/0010-one-scale-for-a-matrix.md), and 0.917 in the last, where it took 41 us more than "
        "its product. Why is not known; the layer ran right behind the copy in most rounds, and what that leaves in "
        "the cache to be written is 12 us at most for eight calls. The benchmark lets that be written first since, and "
        "was not run again. A variant that stops when all magnitudes are known took 22 us, and 8 for a matrix of one "
        "unit a program: two launches, one of which clears 132 words, waiting for the others, and instructions that "
        "are fetched once. A maximum from the layer in front would save a read.",
    ),
    Reason(
        "linear_gpu",
        {"case": "fp8 channel", "rows_of_x": 16},
        "Most of it is reading, in an order that costs 1 us: kernels that only read 64 MiB take 18.2 us with 128 rows "
        "and a quarter of the columns a program, as this one had, and 17.1 with 16 whole rows a program, with which x "
        "would be read eight times as often; adding the shares takes 1.2. Since quarters take turns, 128 columns each, "
        "16 rows take 19.9 us where they took 20.5. Tried before, in a process in which this kernel took 19.8 us: 4 "
        "warps, two steps a body and the last step read twice (20.1 to 20.6), steps of 256 columns (19.6 to 20.3); "
        "where it took 20.0 to 20.6: codes two steps ahead (21.0), by asynchronous copies (33), by TMA (21.5).",
    ),
    Reason(
        "linear_gpu",
        {"case": "mxfp8", "rows_of_x": 16},
        "Nsight Compute: warps wait for codes a third of the time and for each other at a step's two barriers a fifth; "
        "adding the shares takes 1.2 us. Tried: 4, 8 and 16 warps, 2 to 8 shares, steps of 64 to 512 columns, one to "
        "four products between barriers, codes asked for before and after decoding, x and scales two steps ahead, 80 "
        "to 160 registers, scales prefetched, x by asynchronous copies. What helped: scales asked for before codes, "
        "21.8 to 20.9 us, and shares that take turns, to 20.5.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 16},
        "36 MiB take 9.0 us at the rate of a copy, 13.8 are allowed, the kernel takes 15.2, and computing takes as "
        "long as reading. Processes differ by 1 us: times are to be compared within a sentence. Variants that leave "
        "nothing out were checked, with rows of x that have a single 1, bit for bit.\n\n"
        "Taken apart, when it took 16.1 us: a variant that can stop takes 5.5, 10.6 and 16.5 for 1, 4 and all 8 steps, "
        "so 4 to 5 us do not depend on the columns (two launches, addresses, the first reads, the sums). Without "
        "reading codes, all 8 steps take 8.9 us if they only multiply what is there, 13.4 if they decode it too, 14.2 "
        "with each step's x. With codes, they take 15.6 without x, 11.3 if codes are not decoded and x is the first "
        "step's. Reading the codes alone takes 10.2. So reading is hidden but for 2 us, and computing is what would "
        "have to be shorter.\n\n"
        "Nsight Compute: issue slots 55 % while multiprocessors work, integer units 50, L1 47 of all cycles; of 6.5 "
        "cycles between two instructions of a warp 1.6 wait for memory, 0.9 at barriers, 0.8 for the integer units. No "
        "unit is full, and 16 warps are not enough to fill one; but 24 with 80 registers and 6 shares took 18.8 us and "
        "more, 32 with 64 registers 26.2, where this one took 16.6.\n\n"
        "What helped: no codes asked for before the launch's wait, and 512 columns a program where shares are added, "
        "16.1 to 15.5.\n\n"
        "What reads earlier or deeper is slower: the first step's codes queue behind the next steps', and computing "
        "follows them. Where this kernel took 16.1 us: codes by asynchronous copies in 2 to 5 stages 27 and more, by "
        "TMA 17.5, in registers two steps ahead 18.3, brought into the L2 cache by bulk prefetches 18 to 20, blocks' "
        "and the tensor's scales before the first step 16.3.\n\n"
        "Other divisions: bodies of two steps 16.4, weights decoded a product ahead 20.7 (Triton sends them through "
        "shared memory); earlier, x two steps ahead or by asynchronous copies, one to four products between barriers, "
        "64 to 256 rows a program, 2 to 8 shares, 64 to 190 registers, all of a step decoded at once. Where this "
        "kernel took 15.4 us: shares that take turns 16.1, which helps fp8; programs in another order 15.8; steps that "
        "begin at another place in each program 15.6; 104 and 112 registers, which leave room for the launch that "
        "adds, 20.9 and 17.3.\n\n"
        "Products by mma.sync instead of wgmma, with x as the left operand and weights that stay in registers, in "
        "plain Triton: 16.2 where this kernel took 15.4, with one barrier for 256 columns instead of two 16.3. Each "
        "warp reads x from shared memory then, and the L1 pipe is full. In Gluon, where this kernel took 16.5: "
        "mma.sync 15.9, with codes two steps ahead 17.4; codes by TMA 17.4 with 2 stages, 18.4 with 3, 19.5 with 4; "
        "asynchronous wgmma while the next piece is decoded 18.9; x of all steps laid down beforehand 20 to 25.\n\n"
        "Other layouts of the weight, where this kernel took 15.4 us: bits that shifts and masks alone bring to their "
        "places, 18 operations for 16 codes instead of 26, 14.5; these, codes and scales in the order in which warps "
        "read them, and mma.sync, 14.1 to 14.3. So a layout that only this kernel could read would come to a share of "
        "0.63.\n\n"
        "Clocks in each program (docs/design/0009-products.md): 16 steps of a multiprocessor's two programs take 11.6 "
        "us of 15.7, sums and launches 1.7, the first reads and programs that are done before the last one the rest. "
        "Where this kernel took 15.5 us, tried for each: 24 warps without a spill, in pieces of 128 columns and six "
        "shares 17.9, or 64 rows a program 17.1 to 20.9; the first steps' codes brought into the L2 cache by bulk "
        "prefetches before the wait, so that these steps end 0.5 us earlier, 16.4, since the wait is reached later; "
        "later steps' codes prefetched in the loop 20.4; the second of a multiprocessor's programs with an eighth "
        "fewer columns, so that both end together, 15.3; a band's programs as a cluster that adds its shares itself "
        "15.6 (22.6 where not all clusters run at once). Codes read without the mark that a cache may lose them first "
        "16.2, both pieces' codes asked for together 18.0, scales earlier in a step 15.5 to 15.8. The kernel for few "
        "rows takes 22.4 and more.\n\n"
        "Not tried: sums that the last program of a band adds, which needs counters that are zero, and no two streams "
        "could share them; sums of a cluster through shared memory, which Triton can't address.",
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
