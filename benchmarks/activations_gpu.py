"""How fast olq quantizes activations and fills dummy weights on a GPU, in one run with a copy and torch.compile.

    python -m benchmarks.activations_gpu [--case "mxfp8"] [--rounds 15] [--results FILE]

For each case: first the operator's bytes against the format's formula in plain torch; what differs is not timed.

activations   4096 x 8192 and 16 x 8192 bfloat16. Time on the GPU: a CUDA graph of calls, outputs made in it, so that no
              launch is waited for; beside it graphs of plain copies of x, and of the formula compiled. The share is
              (least bytes / time) / the copy's rate, the median over rounds in which all run. Then microseconds of
              calls in a row without a graph, Python and allocation included.
dummy         128 Mi elements, against `fill_` of the same bytes; and the peak of memory beside them.

Each row is printed, and appended to FILE as a line of JSON with the machine and the versions.

Exit status: 1 if bytes differ; 4 without a CUDA device; else 0.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import gpu_cases as formulas
from benchmarks import runner
from benchmarks.device_time import milliseconds, repeated, turns
from benchmarks.quantize_cpu import first_difference
from olq import activations, kernels
from olq.numerics.random import UniformFill
from olq.numerics.silu import COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG2_E

SHAPES = ((4096, 8192), (16, 8192))
DUMMY = (16384, 8192)
DUMMY_TYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
_CALLS = 10  # a graph
SCALE_2 = 0.01
Row = dict[str, object]
Pair = tuple[Tensor, ...]


# -- formulas -----------------------------------------------------------------------------------------------


def _words(x: Tensor) -> Pair:
    """1 x 128 groups with power-of-two scales, four exponents to an int32."""
    groups = x.unflatten(-1, (-1, 128))
    bits = groups.abs().amax(-1).view(torch.int32)
    field = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    field = torch.where(bits == 0, 127, field)
    factor = ((254 - field) << 23).view(torch.float32)
    shifts = torch.arange(0, 32, 8, device=x.device, dtype=torch.int32)
    words = (field.unflatten(-1, (-1, 4)) << shifts).sum(-1, dtype=torch.int32)
    return formulas._e4m3(groups * factor[..., None]).flatten(-2), words


def _silu_mul(x: Tensor) -> Tensor:
    """docs/formats/activations.md, step by step."""
    g, u = (half.float() for half in x.chunk(2, -1))
    a = g.abs().clamp(max=87.0)
    k = torch.round(a * LOG2_E)
    s = (k * LN2_HIGH - a) + k * LN2_LOW
    p = torch.full_like(s, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        p = p * s + coefficient
    e = p * ((127 - k.to(torch.int32)) << 23).view(torch.float32)
    sigmoid = torch.where(g >= 0, torch.ones_like(e), e) / (1 + e)
    return (g * sigmoid.masked_fill(g < -87, 0.0)) * u


def _groups(x: Tensor) -> Pair:
    groups = x.float().unflatten(-1, (-1, 128))
    scale = formulas._fp8_scale(groups.abs().amax(-1, keepdim=True))
    return formulas._e4m3(groups * (torch.ones_like(scale) / scale)).flatten(-2), scale[..., 0]


@dataclass(frozen=True)
class Case:
    """One operator.

    Args:
        name: what it makes.
        bytes_an_element: of bfloat16 read, and of codes and scales written; the least traffic, for an element of codes.
        inputs: columns of x for a column of codes.
        run: codes and scale by olq.
        plain: the same by the formula, scales in logical order.
    """

    name: str
    bytes_an_element: float
    inputs: int
    run: Callable[[Tensor], Pair]
    plain: Callable[[Tensor], Pair]


CASES = (
    Case("fp8 token", 3.0, 1, activations.quantize_fp8_token, formulas._channel_plain),
    Case("fp8 1x128", 3 + 4 / 128, 1, activations.quantize_fp8_group, _groups),
    Case(
        "fp8 1x128, column-major scales",
        3 + 4 / 128,
        1,
        lambda x: activations.quantize_fp8_group(x, scale_layout="mn_major"),
        _groups,
    ),
    Case(
        "fp8 1x128, packed exponents",
        3 + 1 / 128,
        1,
        lambda x: activations.quantize_fp8_group(x, scale_layout="ue8m0_words"),
        lambda x: _words(x.float()),
    ),
    Case("mxfp8", 3 + 1 / 32, 1, activations.quantize_mxfp8, formulas._mxfp8_plain),
    Case(
        "nvfp4",
        2.5 + 1 / 16,
        1,
        lambda x: activations.quantize_nvfp4(x, _scale_2(x)),
        lambda x: formulas._nvfp4_codes(x, _scale_2(x))[:2],
    ),
    Case(
        "silu mul fp8 1x128, packed exponents",
        5 + 1 / 128,
        2,
        activations.silu_mul_quantize_fp8,
        lambda x: _words(_silu_mul(x)),
    ),
)

_SCALES: dict[torch.device, Tensor] = {}


def _scale_2(x: Tensor) -> Tensor:
    """A tensor scale that is there already, as a calibrated one is."""
    if x.device not in _SCALES:
        _SCALES[x.device] = torch.full((), SCALE_2, device=x.device)
    return _SCALES[x.device]


# -- timing -------------------------------------------------------------------------------------------------


def _rounds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call on the GPU, in each round."""
    graphs = {name: repeated([call], _CALLS) for name, call in calls.items()}
    for replay, _ in graphs.values():
        replay()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(calls, rounds):
        replay, count = graphs[name]
        times[name].append(milliseconds(replay) / count * 1e3)
    return times


def _in_a_row(call: Callable[[], object], count: int = 200) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def activation(case: Case, x: Tensor, rounds: int) -> Row:
    """One row of an operator."""
    compiled, target = torch.compile(case.plain, dynamic=False), torch.empty_like(x)
    equal = first_difference(compiled(x), case.plain(x)) is None
    calls: dict[str, Callable[[], object]] = {
        "olq": lambda: case.run(x),
        "copy": lambda: target.copy_(x),
        "compiled": lambda: compiled(x),
    }
    times = _rounds(calls, rounds)
    least = case.bytes_an_element * x.numel() / case.inputs
    shares = [
        least / (4 * x.numel()) * copy / ours for ours, copy in zip(times["olq"], times["copy"], strict=True)
    ]
    low, share, high = statistics.quantiles(shares, n=4)
    return {
        "gpu_us": statistics.median(times["olq"]),
        "copy_us": statistics.median(times["copy"]),
        "share": share,
        "share_quartiles": [low, high],
        "compiled_gpu_us": statistics.median(times["compiled"]),
        "compiled_has_equal_bytes": equal,
        "in_a_row_us": _in_a_row(calls["olq"]),
        "in_a_row_compiled_us": _in_a_row(calls["compiled"]),
    }


def dummy(dtype: torch.dtype, rounds: int) -> Row:
    """One row of dummy weights."""
    weight = torch.empty(DUMMY, dtype=dtype, device="cuda")
    raw, fill = weight.view(torch.uint8), UniformFill(-1e-3, 1e-3, 1234, kernels.fill_uniform)
    calls: dict[str, Callable[[], object]] = {
        "olq": lambda: fill.fill_(weight, "w"),
        "fill": lambda: raw.fill_(1),
        "transposed": lambda: fill.fill_(weight.t(), "w"),
    }
    times = _rounds(calls, rounds)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calls["olq"]()
    return {
        "gpu_us": statistics.median(times["olq"]),
        "fill_us": statistics.median(times["fill"]),
        "of_a_fill": statistics.median(a / b for a, b in zip(times["olq"], times["fill"], strict=True)),
        "transposed_gpu_us": statistics.median(times["transposed"]),
        "scratch_bytes": torch.cuda.max_memory_allocated() - before,
    }


def check(case: Case, x: Tensor) -> str | None:
    """What is wrong with the bytes, or None; the second call is a replay."""
    want = case.plain(x)
    for _ in range(2):
        difference = first_difference(case.run(x), want)
        if difference:
            return difference
    return None


def check_dummy(dtype: torch.dtype, device: str) -> str | None:
    """The same of dummy weights, against the rule in PyTorch."""
    got = torch.empty(300, 4096, dtype=dtype, device=device)
    UniformFill(-1e-3, 1e-3, 1234, kernels.fill_uniform).fill_(got, "w")
    want = torch.empty(300, 4096, dtype=dtype)
    UniformFill(-1e-3, 1e-3, 1234).fill_(want, "w")
    return first_difference((got.cpu(),), (want,))


def activation_of(case: Case, shape: tuple[int, int], device: str) -> Tensor:
    """A bfloat16 activation: normal, rows of different sizes; the same each time on a device."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape[0], shape[1] * case.inputs, device=device, generator=generator)
    return (x * torch.rand(shape[0], 1, device=device, generator=generator).add_(0.5)).bfloat16()


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for, print the rows, return the exit status."""
    names = [case.name for case in CASES] + [f"dummy {dtype}" for dtype in DUMMY_TYPES]
    chosen = runner.options(argv, "activations_gpu", str(__doc__), cases=names, rounds=15, check=False)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is timed")
        return runner.NO_GPU
    machine, red = runner.environment(), False
    print(", ".join(f"{name} {value}" for name, value in machine.items()))

    def finish(name: str, shape: tuple[int, int], difference: str | None, measure: Callable[[], Row]) -> None:
        nonlocal red
        head = f"{name:36} {shape[0]}x{shape[1]}"
        if difference:
            print(f"{head} NOT TIMED, its bytes differ from the formula: {difference}")
            red = True
            return
        row = measure()
        words = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{head} {words}", flush=True)
        runner.keep({"case": name, "shape": f"{shape[0]}x{shape[1]}", **row, **machine}, chosen.results)

    for shape in SHAPES:
        for case in CASES:
            if not chosen.case or case.name in chosen.case:
                x = activation_of(case, shape, "cuda")
                finish(case.name, shape, check(case, x), lambda c=case, t=x: activation(c, t, chosen.rounds))
    for dtype in DUMMY_TYPES:
        if not chosen.case or f"dummy {dtype}" in chosen.case:
            different = check_dummy(dtype, "cuda")
            finish(f"dummy {dtype}", DUMMY, different, lambda d=dtype: dummy(d, chosen.rounds))
    return runner.WRONG if red else 0


if __name__ == "__main__":
    sys.exit(main())
