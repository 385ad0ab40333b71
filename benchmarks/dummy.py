"""What dummy weights cost on a CPU, and what `empty` saves over zeros, as ratios of one run.

    python -m benchmarks.dummy [--elements 67108864] [--rounds 5] [--threads N] [--check]

First each filler's bytes are compared with a plain formula over the whole tensor; one that differs is not timed. Then
rounds, in each of which all contestants run once, one after the other, so that a busy machine is busy for all of them.
A ratio is the median over rounds, with the middle half of the rounds in brackets.

    olq      UniformFill, olq's own rule
    scratch  the field's form: empty_like in float16, uniform_, copy_
    inplace  uniform_ on the tensor itself, where torch has it
    fill     fill_ of the same bytes: the least that writing them takes

Exit status: 1 if bytes differ; 3 with --check if olq is slower than the field's form or takes more than 4 MiB of
scratch; else 0.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.quantize_cpu import environment
from olq.alloc import TensorSpec, allocate
from olq.numerics.random import UniformFill, key
from olq.reload.dummy import dummy_init_tensor
from olq.testing.memory import measure_memory

BYTES_DIFFER, MISSED = 1, 3
SCRATCH_BOUND = 4 << 20
LOW, HIGH, SEED, NAME = -1e-3, 1e-3, 1234, "model.layers.0.mlp.down_proj.weight"
CASES = {
    "E4M3": (torch.float8_e4m3fn, False),
    "E4M3, transposed": (torch.float8_e4m3fn, True),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16, transposed": (torch.bfloat16, True),
}


def make(dtype: torch.dtype, elements: int, transposed: bool) -> Tensor:
    """A matrix whose every byte is 0xA5."""
    columns = min(8192, elements)
    raw = torch.full((elements // columns, columns * dtype.itemsize), 0xA5, dtype=torch.uint8)
    weight = raw.view(dtype)
    return weight.t() if transposed else weight


def plain_formula(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The rule over a whole tensor at once, in 64-bit integers: docs/formats/dummy.md, word for word."""
    count, mask = shape.numel(), 0xFFFFFFFF
    key_0, key_1 = key(SEED, NAME, 0)
    x = (torch.arange((count + 1) // 2) * 0x9E3779B9 + key_0) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15) ^ key_1) * 0x846CA68B) & mask
    x = x ^ (x >> 16)
    halves = torch.stack([x & 0xFFFF, x >> 16], dim=-1).flatten()[:count]
    draws = halves - ((halves >> 15) << 16)
    return (draws.float() * UniformFill(LOW, HIGH, SEED).step).to(dtype).view(shape)


def field_form(weight: Tensor) -> None:
    """What the field does to a parameter under 16 bits, and did to all."""
    generator = torch.Generator().manual_seed(SEED)
    scratch = torch.empty_like(weight, dtype=torch.float16).uniform_(LOW, HIGH, generator=generator)
    weight.copy_(scratch)


def field_inplace(weight: Tensor) -> None:
    """What the field does to a parameter of 16 bits or more."""
    weight.uniform_(LOW, HIGH, generator=torch.Generator().manual_seed(SEED))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes, in logical order."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(dtype: torch.dtype, transposed: bool) -> str | None:
    """What is wrong with the bytes, on a tensor of several boxes, or None."""
    weight = make(dtype, 1 << 20, transposed)
    UniformFill(LOW, HIGH, SEED).fill_(weight, NAME)
    if not same_bytes(weight, plain_formula(weight.shape, dtype)):
        return "olq's rule differs from its formula"
    theirs = make(dtype, 1 << 20, transposed)
    (field_form if dtype.itemsize < 2 else field_inplace)(theirs)
    dummy_init_tensor(weight, LOW, HIGH, SEED, compat="vllm")
    return None if same_bytes(weight, theirs) else 'compat="vllm" differs from torch\'s calls'


def rounds_of(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; one round before that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in times.items()}


def ratio(slow: list[float], fast: list[float]) -> tuple[float, str]:
    """The median of slow / fast, and the same in words."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
    return middle, f"{middle:6.2f}x [{low:.2f}, {high:.2f}]"


def dummy_line(label: str, weight: Tensor, rounds: int) -> tuple[str, list[str]]:
    """One row of the table, and the targets that were missed."""
    fill = UniformFill(LOW, HIGH, SEED)
    memory = weight.t() if not weight.is_contiguous() else weight
    calls: dict[str, Callable[[], object]] = {
        "olq": lambda: fill.fill_(weight, NAME),
        "scratch": lambda: field_form(weight),
        "fill": lambda: memory.view(torch.uint8).fill_(1),
    }
    if weight.dtype.itemsize > 1:
        calls["inplace"] = lambda: field_inplace(weight)
    times = rounds_of(calls, rounds)
    olq_scratch = measure_memory(lambda: UniformFill(LOW, HIGH, SEED).fill_(weight, NAME)).peak_bytes
    field_scratch = measure_memory(lambda: field_form(weight)).peak_bytes
    speed, words = ratio(times["scratch"], times["olq"])
    text = f"{label:20} {statistics.median(times['olq']) * 1e3:8.1f} {words:>24}"
    text += f" {ratio(times['inplace'], times['olq'])[1] if 'inplace' in times else '-':>24}"
    text += f" {ratio(times['olq'], times['fill'])[0]:9.1f}x"
    text += f" {olq_scratch / 2**20:8.2f} {field_scratch / 2**20:8.0f}"
    missed = [f"{label}: {speed:.2f}x of the field's form, target 1x"] if speed < 1 else []
    if olq_scratch > SCRATCH_BOUND:
        missed.append(f"{label}: {olq_scratch} bytes of scratch, bound {SCRATCH_BOUND}")
    return text, missed


def outputs_line(elements: int, rounds: int) -> str:
    """An output of codes that its producer overwrites: made with zeros, and made by olq.alloc."""
    produced = torch.full((elements,), 7, dtype=torch.uint8)
    spec = TensorSpec((elements,), torch.uint8)
    times = rounds_of(
        {
            "zeros": lambda: torch.zeros(elements, dtype=torch.uint8).copy_(produced),
            "empty": lambda: allocate(spec, device="cpu", owner="benchmark").copy_(produced),
        },
        rounds,
    )
    return f"an output of {elements >> 20} MiB, zeros then produced / empty then produced: {ratio(*times.values())[1]}"


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dummy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    print(environment(chosen.threads))
    print(
        f"{'dummy weights':20} {'olq ms':>8} {'scratch form / olq':>24} {'in place / olq':>24} "
        f"{'olq / fill':>10} {'scratch':>8} {'field':>8}  (MiB)"
    )
    missed, red = [], False
    for label, (dtype, transposed) in CASES.items():
        difference = check(dtype, transposed)
        if difference:
            print(f"{label:20} NOT TIMED: {difference}")
            red = True
            continue
        text, more = dummy_line(label, make(dtype, chosen.elements, transposed), chosen.rounds)
        print(text, flush=True)
        missed += more
    print(outputs_line(chosen.elements, chosen.rounds))
    for text in missed:
        print(f"target missed: {text}")
    if red:
        return BYTES_DIFFER
    return MISSED if missed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
