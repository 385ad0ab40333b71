"""How fast layers with quantized weights and activations multiply on a GPU, against torch's bare product and a copy.

    python -m benchmarks.forward_gpu [--case token] [--rounds 15] [--results FILE] [--check]

8192 x 8192 weights of fp8, x in bfloat16, in CUDA graphs that go through more weights than the L2 cache holds, many
times where one call takes microseconds. For each case and number of rows M: first the output against float64 products
of the quantized values; what is off is not timed. Then rounds, in each of which these run one after the other, between
CUDA events:

layer     the whole call: x is quantized, multiplied, scaled
product   the same without quantizing x
bare      torch.nn.functional.scaled_mm of the recipe that the scales have, on operands that are there
copy      a plain copy on the device, for the rate at which bytes can be moved: of all rows' medians the fastest

M = 4096   share = bare / layer
M = 1, 16  share = time to read and write the operands at the rate of the copy / product; `share_of_layer` counts all

Each row is printed, and appended to FILE as a line of JSON with the machine and the versions.

Exit status: 1 if values are off; 3 with --check if a target is missed; 4 without a CUDA device of compute capability
9.x; else 0.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import olq
from benchmarks import runner
from benchmarks.device_time import CALLS, Copy, copy_of_a_gibibyte, in_turns, repeated
from olq import forward
from olq.forward import scaled, scaled_fp8
from olq.forward.activations import quantize_fp8

N = K = 8192
LAYERS = 8  # of 64 MiB each; an H200 has an L2 cache of 50 MB
LARGE, SMALL = 4096, (1, 16)
TARGETS = {LARGE: 0.92, 1: 0.80, 16: 0.80}
EACH, ROUNDING = 2.0**-10, 2.0**-8  # tensor cores' share of the sum of magnitudes; bfloat16
Row = dict[str, object]
Call = Callable[[int], object]


class Case(NamedTuple):
    """Scales of the weight and of x, and what one scale of x covers: rows and columns, 0 for all."""

    name: str
    granularity: str
    activations: str
    unit: tuple[int, int]


CASES = (
    Case("tensor", "tensor", "tensor", (0, 0)),
    Case("token", "channel", "token", (1, 0)),
    Case("block", "block", "group", (1, 128)),
)


class Layer(nn.Module):
    """An engine's layer, without a bias."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.quant_method = olq.get_method(
            "fp8", granularity=case.granularity, activations=case.activations, path="scaled_mm"
        )
        self.quant_method.create_weights(self, K, N, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """[M, N]."""
        return self.quant_method.apply(self, x)


def made(case: Case) -> list[Layer]:
    """Layers with weights of many magnitudes."""
    layers = []
    for seed in range(LAYERS):
        generator = torch.Generator("cuda").manual_seed(seed)
        w = torch.randn(N, K, generator=generator, device="cuda")
        w *= torch.exp2(torch.randint(-3, 3, (N, 1), generator=generator, device="cuda"))
        with torch.device("cuda"):
            layers.append(Layer(case))
        olq.load(layers[-1], {"weight": w.bfloat16()})
    return layers


def inputs(m: int) -> list[Tensor]:
    """One x for each layer."""
    generator = torch.Generator("cuda").manual_seed(100)
    return [
        torch.randn(m, K, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)
    ]


def plain(x: Tensor, unit: tuple[int, int]) -> Tensor:
    """x, quantized by the rule in docs/formats/fp8.md and decoded: float64."""
    rows, columns = unit[0] or x.shape[0], unit[1] or x.shape[1]
    blocks = x.float().unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.tensor(448.0, device=x.device)
    codes = (blocks * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).flatten(2).flatten(0, 1)


def off(case: Case, layer: Layer, x: Tensor) -> float:
    """The largest error of up to 64 rows over its bound; at most 1 is right."""
    y, w = layer(x)[:64].double(), olq.dequantize(layer, dtype=torch.float32).double()
    xq = plain(x, case.unit)[:64]
    exact = xq @ w.t()
    magnitude = xq.abs() @ w.abs().t()
    bound = EACH * magnitude + ROUNDING * (exact.abs() + EACH * magnitude)
    return float(((y - exact).abs() / bound).nan_to_num(nan=torch.inf).max())


def calls(case: Case, layers: list[Layer], xs: list[Tensor]) -> dict[str, Call]:
    """What is timed, each for the i-th layer."""
    stored = [layer.quant_method.stored(layer).tensors for layer in layers]
    operands = [
        scaled_fp8.operands_fp8(x, t[""], t["_scale"], (N,), case.activations, False)
        for x, t in zip(xs, stored, strict=True)
    ]
    found: dict[str, Call] = {
        "layer": lambda i: layers[i](xs[i]),
        "bare": lambda i: scaled.multiply(operands[i], None, torch.bfloat16),
    }
    if scaled_fp8.has_kernel(xs[0], stored[0]["_scale"], case.activations):
        quantized = [quantize_fp8(x, case.activations, False) for x in xs]
        found["product"] = lambda i: scaled_fp8.by_codes(
            *quantized[i],
            stored[i][""],
            stored[i]["_scale"],
            None,
            (N,),
            (0,),
            case.activations,
            torch.bfloat16,
        )
    else:
        found["product"] = found["bare"]
    return found


def measure(
    case: Case, layers: list[Layer], xs: list[Tensor], copy: Copy, rounds: int
) -> tuple[Row, dict[str, list[float]]]:
    """Medians over rounds, in microseconds; and milliseconds of a call in each round."""
    least = LAYERS if xs[0].shape[0] == LARGE else CALLS
    runs = {
        name: repeated([functools.partial(call, i) for i in range(LAYERS)], least)
        for name, call in calls(case, layers, xs).items()
    }
    taken = in_turns(runs, copy, rounds, untimed=2)
    rate = copy.seen(taken.pop("copy"))
    row: Row = {f"{name}_us": statistics.median(values) * 1e3 for name, values in taken.items()}
    return {**row, "copy_terabytes_a_second": rate}, taken


def shares(m: int, taken: dict[str, list[float]], copy: Copy) -> Row:
    """What a row says of its target, when the copies of all rows have been seen."""
    row: Row = {}
    if m == LARGE:
        found = [b / a for a, b in zip(taken["layer"], taken["bare"], strict=True)]
    else:
        least = copy.milliseconds(N * K + m * K + 2 * m * N)  # codes of W and x, and y
        found = [least / t for t in taken["product"]]
        row = {
            "fastest_terabytes_a_second": copy.fastest / 1e9,
            "least_us": least * 1e3,
            "share_of_layer": least / statistics.median(taken["layer"]),
        }
    low, share, high = statistics.quantiles(found, n=4)
    return {**row, "share": share, "share_quartiles": [low, high], "target": TARGETS[m]}


def line(row: Row) -> str:
    """One row as text."""
    names = ("layer_us", "product_us", "bare_us", "least_us")
    text = ", ".join(f"{name[:-3]} {row[name]:.2f}" for name in names if name in row)
    whole = f", of the layer {row['share_of_layer']:.3f}" if "share_of_layer" in row else ""
    low, high = row["share_quartiles"]  # pyright: ignore[reportGeneralTypeIssues]
    return (
        f"{row['case']:7} M {row['m']:<5} {text} us; share {row['share']:.3f} [{low:.3f}, {high:.3f}]"
        f"{whole}, target {row['target']:.2f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for, print the rows, return the exit status."""
    chosen = runner.options(argv, "forward_gpu", str(__doc__), cases=[case.name for case in CASES], rounds=15)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("no CUDA device of compute capability 9.x: nothing is timed")
        return runner.NO_GPU
    machine = runner.environment()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    copy = copy_of_a_gibibyte()
    measured, missed, red = [], [], False
    for case in CASES:
        if chosen.case and case.name not in chosen.case:
            continue
        layers = made(case)
        for m in (*SMALL, LARGE):
            xs = inputs(m)
            error = max(off(case, layer, x) for layer, x in zip(layers[:2], xs, strict=False))
            if error > 1:
                print(f"{case.name:7} M {m:<5} NOT TIMED, its values are off: {error:.2f} times the bound")
                red = True
                continue
            path = str(forward.path(layers[0], xs[0]))
            row = {"case": case.name, "m": m, "shape": f"{N}x{K}", "error_over_bound": error, "path": path}
            medians, taken = measure(case, layers, xs, copy, chosen.rounds)
            measured.append((case, m, {**row, **medians, **machine}, taken))
    for case, m, row, taken in measured:
        row |= shares(m, taken, copy)
        print(line(row))
        if isinstance(row["share"], float) and row["share"] < TARGETS[m]:
            missed.append(f"{case.name}, M {m}: {row['share']:.3f}, target {TARGETS[m]:g}")
        runner.keep(row, chosen.results)
    for text in missed:
        print(f"target missed: {text}")
    if red:
        return runner.WRONG
    return runner.MISSED if missed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
