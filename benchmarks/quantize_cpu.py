"""How fast olq quantizes on a CPU, as ratios of one run, and how much memory it takes beside its results.

    python -m benchmarks.quantize_cpu [--shape 4096x4096] [--case nvfp4] [--rounds 9] [--threads N]

For each case and shape: first the operator's bytes against the format's formula in plain torch, whole tensor at
once; a case whose bytes differ is not timed. Then rounds, in each of which olq, the peer and a plain bfloat16 copy
run once, one after the other, so that a busy machine is busy for all of them. Before each the weight is copied once
untimed, and who begins a round changes: nobody always starts with what one other left in the caches. A ratio is the
median over rounds of (peer's time / olq's time), with the middle half of the rounds in brackets.

Rounds during which other programs had more than a fifth of the processors are set aside, whatever they gave: an
operator that is spread over all cores waits for the one that is taken. The table says how many those were. If there
are too few others, all rounds count, and the line ends in BUSY.

Exit status: 1 if bytes differ; 3 with --check if a ratio or the scratch misses its target; 4 with --require-peers if
torchao is missing; else 0.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quantize_cases import CASES, SCRATCH_BOUND, SHAPES, Case, weight
from olq.testing.memory import measure_memory

BYTES_DIFFER, MISSED, NO_PEER = 1, 3, 4
TAKEN = 0.2
"""Share of the processors' time that other programs may have in a round."""

TRIES = 3
"""Times as many rounds as asked for, at most, in search of quiet ones."""


@dataclass(frozen=True)
class Result:
    """What one case on one shape gave; times are a list each, in seconds, one a round that counts. `set_aside`
    rounds do not; `busy` if all count because too few were quiet."""

    case: Case
    elements: int
    times: dict[str, list[float]]
    scratch: dict[str, int]
    set_aside: int
    busy: bool

    def ratio(self, slow: str, fast: str = "olq") -> tuple[float, float, float]:
        """Quartiles over the rounds of slow / fast: lower, median, upper."""
        rounds = [a / b for a, b in zip(self.times[slow], self.times[fast], strict=True)]
        low, middle, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else rounds * 3
        return low, middle, high

    @property
    def missed(self) -> list[str]:
        """Targets that were not reached, as sentences."""
        found = []
        if "peer" in self.times and self.ratio("peer")[1] < self.case.target:
            found.append(f"{self.case.name}: {self.ratio('peer')[1]:.2f}x, target {self.case.target:g}x")
        if self.scratch["olq"] > SCRATCH_BOUND:
            found.append(f"{self.case.name}: {self.scratch['olq']} bytes of scratch, bound {SCRATCH_BOUND}")
        return found


def first_difference(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str | None:
    """None if all tensors have equal bytes, else which one differs first, and where."""
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (g, w))
        if a.shape != b.shape:
            return f"output {index} has {len(a)} bytes, not {len(b)}"
        wrong = (a != b).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return (
                f"output {index}: {len(wrong)} of {len(a)} bytes, first at {at}: {int(a[at])} != {int(b[at])}"
            )
    return None


def check(case: Case, w: Tensor) -> str | None:
    """Run the operator once on `w` into poisoned storage and compare it with the formula."""
    outputs = case.outputs(w)
    for out in outputs:
        out.view(-1).view(torch.uint8).fill_(0xA5)
    case.run(w, *outputs)
    return first_difference(outputs, case.plain(w))


def measure(case: Case, w: Tensor, peer: Callable[[Tensor], object] | None, rounds: int) -> Result:
    """Time the contestants in turn; then the peak memory of one call each."""
    outputs, target = case.outputs(w), torch.empty_like(w)
    contestants: dict[str, Callable[[], object]] = {
        "olq": lambda: case.run(w, *outputs),
        "copy": lambda: target.copy_(w),
    }
    if peer is not None:
        contestants["peer"] = lambda: peer(w)
    for call in contestants.values():
        call()
    order, quiet, loud = list(contestants), [], []
    while len(quiet) < rounds and len(quiet) + len(loud) < TRIES * rounds:
        order.append(order.pop(0))
        before, times = processors(), {}
        for name in order:
            call = contestants[name]
            target.copy_(w)
            start = time.perf_counter()
            call()
            times[name] = time.perf_counter() - start
        (quiet if taken(before, processors()) <= TAKEN else loud).append(times)
    busy = len(quiet) < rounds
    counted = quiet + loud if busy else quiet
    scratch = {name: measure_memory(call).peak_bytes for name, call in contestants.items() if name != "copy"}
    by_name = {name: [one[name] for one in counted] for name in contestants}
    return Result(case, w.numel(), by_name, scratch, 0 if busy else len(loud), busy)


def processors() -> tuple[float, float, float]:
    """Seconds so far: on the wall, of processors with any program, and with this one. On a system without /proc/stat
    all programs count as this one."""
    wall, own, path = time.perf_counter(), time.process_time(), Path("/proc/stat")
    if not path.exists():
        return wall, own, own
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split("\n")[0].split()[1:9])
    return wall, (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own


def taken(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Share of the machine's processors that other programs had between two readings; about 0.05 is the clock's
    resolution."""
    wall, everybody, own = (b - a for a, b in zip(before, after, strict=True))
    return (everybody - own) / (wall * (os.cpu_count() or 1))


def line(shape: str, result: Result) -> str:
    """One row of the table."""
    case = result.case
    seconds = statistics.median(result.times["olq"])
    copy_rate = 4 * result.elements / statistics.median(result.times["copy"])
    rate = case.bytes_an_element * result.elements / seconds
    text = f"{case.name:16} {shape:11} {seconds * 1e3:8.1f} {rate / 1e9:6.2f} {rate / copy_rate:6.2f}"
    text += f" {result.scratch['olq'] / 2**20:8.2f}"
    if "peer" not in result.times:
        return text + "        -"
    low, middle, high = result.ratio("peer")
    text += f" {middle:8.1f}x [{low:.1f}, {high:.1f}]   {result.scratch['peer'] / 2**20:8.0f}"
    return text + ("  BUSY" if result.busy else f"  {result.set_aside}")


HEADER = (
    f"{'format':16} {'shape':11} {'ms':>8} {'GB/s':>6} {'/copy':>6} {'scratch':>8}"
    f" {'peer/olq':>9} [quartiles]   {'scratch':>8}  set aside (times: median ms; scratch: MiB)"
)


def environment(threads: int) -> str:
    """The machine and the versions that the numbers belong to."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((n.split(":")[1].strip() for n in names if n.startswith("model name")), platform.processor())
    try:
        peer = f"torchao {version('torchao')}"
    except PackageNotFoundError:
        peer = "no torchao"
    return f"{cpu}, {threads} threads, Python {platform.python_version()}, torch {torch.__version__}, {peer}"


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantize_cpu", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES], help="default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--require-peers", action="store_true", help="fail if torchao is missing")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for, print the table, return the exit status."""
    chosen = options(argv)
    torch.set_num_threads(chosen.threads)
    print(environment(chosen.threads))
    print(HEADER)
    missed, missing, red = [], {}, False
    for case in CASES:
        if chosen.case and case.name not in chosen.case:
            continue
        peer = None
        try:
            peer = case.load_peer()
        except ImportError as error:
            missing[case.peer] = str(error)
        for shape in chosen.shape or SHAPES:
            w = weight(SHAPES[shape])
            difference = check(case, w)
            if difference:
                print(f"{case.name:16} {shape:11} NOT TIMED, its bytes differ from the formula: {difference}")
                red = True
                continue
            result = measure(case, w, peer, chosen.rounds)
            print(line(shape, result), flush=True)
            missed += [f"{text} ({shape})" for text in result.missed]
    for name, reason in missing.items():
        print(f"no peer: {name}: {reason}. Install the extra `bench` for it.")
    for text in missed:
        print(f"target missed: {text}")
    if red:
        return BYTES_DIFFER
    if missing and chosen.require_peers:
        return NO_PEER
    return MISSED if missed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
