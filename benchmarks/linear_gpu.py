"""How fast olq multiplies by quantized weights on a GPU: against reading the weight, and against a bfloat16 linear.

    python -m benchmarks.linear_gpu [--case mxfp8] [--rounds 15] [--results FILE] [--check]

For each format, 8192 x 8192: first exactness. Rows of x with a single 1 have to give columns of the weight as the
format's formula decodes it, bit for bit; what differs is not timed. Then, for 1 to 4096 rows of x, rounds in which
olq's operator, a linear with a bfloat16 weight and a copy of 1 GiB run one after the other, in turns; products are
replayed from CUDA graphs that go through so many copies of the weight that no cache holds one, and so often that what
starts a graph is little of each product's time.

share   of olq's time that reading codes and scales would take at a copy's rate (bytes read plus bytes written), of all
        rows' medians the fastest
speed   the bfloat16 linear's time / olq's

Each row is printed, and appended to FILE as a line of JSON with the machine and the versions.

Exit status: 1 if bits differ; 3 with --check if a target is missed; 4 without a CUDA device; else 0.
"""

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import runner
from benchmarks.device_time import CACHE, CALLS, Copy, copy_of_a_gibibyte, in_turns, repeated
from benchmarks.linear_cases import CASES, FEW, MANY, ROWS_OF_X, SHAPE, Case
from olq import kernels

Row = dict[str, object]


def check(case: Case, tensors: tuple[Tensor, ...]) -> str | None:
    """Compare products of rows with a single 1 with columns of the decoded weight, for several numbers of rows."""
    w = case.decode(*tensors).to(torch.bfloat16)
    for m in (1, 4, 8, 16, 32, 200, 300):
        columns = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(m))[:m].to(w.device)
        x = torch.zeros(len(columns), w.shape[1], dtype=torch.bfloat16, device=w.device)
        x[torch.arange(len(columns), device=w.device), columns] = 1.0
        y, want = case.call(x, tensors) + 0.0, w[:, columns].T + 0.0  # a sum begins with +0
        wrong = y.view(torch.int16) != want.view(torch.int16)
        if wrong.any():
            return f"{int(wrong.sum())} of {wrong.numel()} products differ, {m} rows of x"
    return None


def copies(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """As many equal weights as no cache holds, at least two."""
    size = sum(t.numel() * t.element_size() for t in tensors)
    return [tuple(t.clone() for t in tensors) for _ in range(max(2, -(-CACHE // size)))]


def measure(
    case: Case, weights: list[tuple[Tensor, ...]], plain: list[Tensor], copy: Copy, m: int, rounds: int
) -> tuple[Row, float, int]:
    """One number of rows of x; olq's milliseconds, and the bytes that it has to read."""
    x = torch.randn(m, SHAPE[1], dtype=torch.bfloat16, device=plain[0].device)
    least = CALLS if m <= 256 else 1

    def one(weight: tuple[Tensor, ...]) -> Callable[[], object]:
        return lambda: case.call(x, weight)

    def other(w: Tensor) -> Callable[[], object]:
        return lambda: functional.linear(x, w)

    runs = {
        "olq": repeated([one(w) for w in weights], least),
        "linear": repeated([other(w) for w in plain], least),
    }
    runner.warm_up()
    times = in_turns(runs, copy, rounds, untimed=3)
    rate = copy.seen(times["copy"])
    olq, linear = (statistics.median(times[name]) for name in ("olq", "linear"))
    size = sum(t.numel() * t.element_size() for t in weights[0])
    row: Row = {
        "rows_of_x": m,
        "us": olq * 1e3,
        "linear_us": linear * 1e3,
        "copy_terabytes_a_second": rate,
        "share_target": case.share if m in FEW else None,
        "speed": linear / olq,
        "speed_target": case.speed if m == MANY else None,
        "path": str(kernels.path(case.operator, *arguments(case, x, weights[0]))),
    }
    return row, olq, size


def share(olq: float, size: int, copy: Copy) -> Row:
    """What a row says of reading its bytes, when the copies of all rows have been seen."""
    return {"fastest_terabytes_a_second": copy.fastest / 1e9, "share": copy.milliseconds(size) / olq}


def arguments(case: Case, x: Tensor, tensors: tuple[Tensor, ...]) -> tuple[object, ...]:
    """What `olq.kernels.path` is asked about: the result, and the operator's arguments."""
    n = tensors[0].shape[0]
    return x.new_empty(x.shape[0], n), x, *tensors, None, [n], [0], *case.rest


def missed(row: Row) -> list[str]:
    """Targets of a row that were not reached, as sentences."""
    found = []
    for name in ("share", "speed"):
        value, target = row[name], row[f"{name}_target"]
        if isinstance(value, float) and isinstance(target, float) and value < target:
            found.append(
                f"{row['case']}, {row['rows_of_x']} rows of x: {name} {value:.2f}, target {target:g}"
            )
    return found


def line(row: Row) -> str:
    """One row as text."""
    return (
        f"{row['case']:12} {row['rows_of_x']:5} {row['us']:8.1f} us, {row['share']:.2f} of the limit, "
        f"{row['speed']:.2f}x a bfloat16 linear ({row['linear_us']:.1f} us); {row['path']}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for, print the rows, return the exit status."""
    chosen = runner.options(argv, "linear_gpu", str(__doc__), cases=[case.name for case in CASES], rounds=15)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is timed")
        return runner.NO_GPU
    machine = runner.environment()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    plain = [torch.randn(SHAPE, dtype=torch.bfloat16, device="cuda").mul_(0.02) for _ in range(2)]
    copy = copy_of_a_gibibyte()
    every, failed, red = [], [], False
    for case in CASES:
        if chosen.case and case.name not in chosen.case:
            continue
        tensors = case.quantize(plain[0])
        difference = check(case, tensors)
        if difference:
            print(f"{case.name:12} NOT TIMED: {difference}")
            red = True
            continue
        weights = copies(tensors)
        for m in ROWS_OF_X:
            row, olq, size = measure(case, weights, plain, copy, m, chosen.rounds)
            row = {"case": case.name, "shape": f"{SHAPE[0]}x{SHAPE[1]}", **row, **machine}
            every.append((row, olq, size))
    for row, olq, size in every:
        row |= share(olq, size, copy)
        print(line(row))
        failed += missed(row)
        runner.keep(row, chosen.results)
    for text in failed:
        print(f"target missed: {text}")
    if red:
        return runner.WRONG
    return runner.MISSED if failed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
