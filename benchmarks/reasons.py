"""Of targets that are not met: what the profile says, what was tried, and the best that was reached. For the page."""

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


_WHOLE = (
    "No unit is busy all the time (Nsight Compute: DRAM 60 %, L1 73 %, issue slots 43 %, for fp8). A program has 64 "
    "rows of the weight and fills a multiprocessor, so all begin and end together; start, first loads and last sums "
    "take about 4 us that a copy of a gigabyte does not show. "
)

REASONS = (
    Reason(
        "forward_gpu",
        {"case": "tensor", "m": 4096},
        "Quantizing x by one scale reads it twice: 45 us for 64 MiB, of which reading at the rate of a copy is 16 and "
        "reading and writing 24. Tried: the second sweep from where the first ended, started while that ends, what is "
        "read first marked as what the cache may lose (each kept, together 3 us), half as many programs. In a run of "
        "kernels of their own marks gave 5 us and 0.92; here quantizing and product together take as long with them. "
        "The row was measured with half as many programs. A maximum from the layer in front would save a read.",
    ),
    Reason(
        "forward_gpu",
        {"m": 16},
        _WHOLE
        + "Tried: 2 to 16 shares of columns, 1 to 8 bands of rows, 16 to 64 rows a warp, codes one or two steps "
        "ahead, x a step ahead, 64 to 128 registers, every step prefetched into the L2 cache, neighbouring shares in "
        "neighbouring columns. Best: 0.79 in a run by itself. torch's blockwise product takes 26 us.",
    ),
    Reason(
        "linear_gpu",
        {"case": "fp8 channel", "rows_of_x": 1},
        "This first case of the process took 25 us; the same kernel took 19.6 to 20.1 us (0.80 to 0.83) in three "
        "tuning runs. Why is not known. Since then the benchmark keeps the GPU busy before it times, and the product "
        "no longer comes after the copy in each round. It has to be measured again.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 16},
        "The way of x through L1 is the limit (88 % busy): 8 rows of x lie in 8 lines, and each program needs all of "
        "x. With x laid out beforehand as threads want it the kernel takes 18.5 us (0.51), but that layout would cost "
        "a launch of 2 us. Tried as well: 64 rows a warp, at once or 16 after 16, and x through shared memory.",
    ),
    Reason(
        "linear_gpu",
        {"rows_of_x": 16},
        _WHOLE
        + "With all rows of x at one address the time is the same within 2 %, so x is not what it waits for. Tried: "
        "what is said above of few rows of quantized x, and x laid out beforehand. Best: 0.76 (fp8) and 0.71 (mxfp8), "
        "in runs by themselves.",
    ),
    Reason(
        "linear_gpu",
        {"case": "nvfp4", "rows_of_x": 1},
        "36 MiB take 9 us at the rate of a copy; start, first loads and last sums take 4 more. Decoding takes half of "
        "the issue slots, with one integer operation and half a multiplication a code. Tried: fewer rows a warp, more "
        "shares, x a step ahead, prefetching. Best: 0.625 in a run by itself.",
    ),
)


def reason_of(target: Target) -> str | None:
    """The first reason that is about a target."""
    for one in REASONS:
        if one.benchmark == target.benchmark and all(target.where.get(k) == v for k, v in one.where.items()):
            return one.text
    return None
