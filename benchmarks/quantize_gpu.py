"""How fast olq quantizes on a GPU, as shares of a plain copy in the same run, and what it takes beside its results.

    python -m benchmarks.quantize_gpu [--case mxfp8] [--rounds 25] [--results FILE] [--check]

For each case: first the operators' bytes against the format's formula in plain torch; what differs is not timed.

28672 x 8192   rounds, in each of which olq and a plain bfloat16 copy run a few times each, one after the other, between
               CUDA events. The share is the median over rounds of (least bytes / time) / the copy's rate. Then the peak
               of memory of one call beside its results.
4096 x 4096    olq against the compiled formula, launching included, by a clock of the CPU: calls in a row (the time of
               one is what Python or the GPU takes, whichever is longer), and a single call until the GPU is done.

Each row is printed, and appended to FILE as a line of JSON with the machine and the versions.

Exit status: 1 if bytes differ; 3 with --check if a target is missed; 4 without a CUDA device; else 0.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.device_time import milliseconds, turns
from benchmarks.gpu_cases import CASES, LARGE, SCRATCH_BOUND, SMALL, SPEEDUP, Case, weight
from benchmarks.quantize_cpu import first_difference
from olq import kernels

_LAUNCHES = 4  # between two events: an event costs some microseconds
Row = dict[str, object]


def check(case: Case, w: Tensor) -> str | None:
    """Run the operators on `w` into poisoned storage, twice, and compare with the formula."""
    want = case.plain(w)
    for _ in range(2):
        outputs = case.outputs(w)
        for out in outputs[:2]:
            out.view(-1).view(torch.uint8).fill_(0xA5)
        case.run(w, *outputs)
        difference = first_difference(outputs, want)
        if difference:
            return difference
    return None


def large(case: Case, w: Tensor, rounds: int) -> Row:
    """Share of a copy's rate, and scratch."""
    outputs, target = case.outputs(w), torch.empty_like(w)
    calls: dict[str, Callable[[], object]] = {
        "olq": lambda: case.run(w, *outputs),
        "copy": lambda: target.copy_(w),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(calls, rounds + 1):
        times[name].append(milliseconds(calls[name], _LAUNCHES))
    ours, copies = times["olq"][1:], times["copy"][1:]  # the first round compiles and warms
    shares = [case.bytes_an_element / 4 * c / t for t, c in zip(ours, copies, strict=True)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calls["olq"]()
    low, share, high = statistics.quantiles(shares, n=4)
    return {
        "ms": statistics.median(ours),
        "copy_terabytes_a_second": 4 * w.numel() / statistics.median(copies) / 1e9,
        "share": share,
        "share_quartiles": [low, high],
        "target": case.target,
        "scratch_bytes": torch.cuda.max_memory_allocated() - before,
    }


def _row_of_calls(call: Callable[[], object], count: int = 100) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def _single_call(call: Callable[[], object], count: int = 20) -> float:
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def small(case: Case, w: Tensor, rounds: int) -> Row:
    """Microseconds of olq and of the compiled formula, launching included."""
    outputs, compiled = case.outputs(w), torch.compile(case.plain)
    calls: dict[str, Callable[[], object]] = {
        "olq": lambda: case.run(w, *outputs),
        "compiled": lambda: compiled(w),
    }
    equal = first_difference(compiled(w), case.plain(w)) is None
    row: dict[str, list[float]] = {name: [] for name in calls}
    single: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(calls, rounds):
        row[name].append(_row_of_calls(calls[name]))
        single[name].append(_single_call(calls[name]))
    result: Row = {"compiled_has_equal_bytes": equal, "target": SPEEDUP}
    for kind, times in (("in_a_row", row), ("single", single)):
        ratios = [c / o for c, o in zip(times["compiled"], times["olq"], strict=True)]
        result[f"{kind}_us"] = statistics.median(times["olq"])
        result[f"{kind}_compiled_us"] = statistics.median(times["compiled"])
        result[f"{kind}_ratio"] = statistics.median(ratios)
    return result


def missed(row: Row) -> list[str]:
    """Targets of a row that were not reached, as sentences."""
    found = []
    for name in ("share", "in_a_row_ratio", "single_ratio"):
        value, target = row.get(name), row["target"]
        if isinstance(value, float) and isinstance(target, float) and value < target:
            found.append(f"{row['case']}, {row['shape']}: {name} {value:.2f}, target {target:g}")
    scratch = row.get("scratch_bytes", 0)
    if isinstance(scratch, int) and scratch > SCRATCH_BOUND:
        found.append(f"{row['case']}, {row['shape']}: {scratch} bytes of scratch, bound {SCRATCH_BOUND}")
    return found


def line(row: Row) -> str:
    """One row as text."""
    text = f"{row['case']:20} {row['shape']:11}"
    if "share" in row:
        low, high = row["share_quartiles"]  # pyright: ignore[reportGeneralTypeIssues]
        text += f" {row['ms']:7.4f} ms, {row['share']:.3f} of a copy [{low:.3f}, {high:.3f}]"
        return text + f", target {row['target']:.2f}; scratch {row['scratch_bytes']} bytes"
    for kind in ("in_a_row", "single"):
        ours, peer, ratio = (row[f"{kind}{end}"] for end in ("_us", "_compiled_us", "_ratio"))
        text += f" {kind} {ours:.1f} us, compiled {peer:.1f} us, {ratio:.2f}x;"
    return text + f" compiled bytes equal: {row['compiled_has_equal_bytes']}"


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for, print the rows, return the exit status."""
    chosen = runner.options(
        argv, "quantize_gpu", str(__doc__), cases=[case.name for case in CASES], rounds=25
    )
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is timed")
        return runner.NO_GPU
    machine = runner.environment()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    failed, red = [], False
    for shape, measure, rounds in ((LARGE, large, chosen.rounds), (SMALL, small, max(3, chosen.rounds // 5))):
        w, name = weight(shape, "cuda"), f"{shape[0]}x{shape[1]}"
        for case in CASES:
            if chosen.case and case.name not in chosen.case:
                continue
            difference = check(case, w)
            if difference:
                print(f"{case.name:20} {name:11} NOT TIMED, its bytes differ from the formula: {difference}")
                red = True
                continue
            paths = [str(kernels.path(op, *args)) for op, args in case.calls(w, *case.outputs(w))]
            row = {"case": case.name, "shape": name, **measure(case, w, rounds), "paths": paths, **machine}
            print(line(row), flush=True)
            failed += missed(row)
            runner.keep(row, chosen.results)
    for text in failed:
        print(f"target missed: {text}")
    if red:
        return runner.WRONG
    return runner.MISSED if failed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
