"""How long a reload of a whole model takes on a GPU, through the public API, as a multiple of what its bytes take.

    python -m benchmarks.reload_gpu [--method fp8] [--layers 32] [--rounds 9] [--results FILE]

The linear layers of a Llama-3-8B shape (fused qkv and gate_up, loaded by weight loaders with shard ids under the names
that checkpoints have), sources in bfloat16 on the GPU already. First the bytes of a replayed reload against a fresh
load's: if they differ nothing is timed. Then some reloads that are not timed, then rounds, in each of which a reload
(begin, feeds, flush, commit) and a plain bfloat16 copy run, one after the other, by a clock of the CPU with the GPU
idle at both ends. The limit is the bytes that the case has to move at the copy's rate of the same round. Then the most
memory that a reload took beside the model.

Exit status: 1 if bytes differ; 4 without a CUDA device; else 0.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import olq
from benchmarks import runner

#: Bytes an element that a case has to move: read bf16 (nvfp4 twice), write codes and scales.
BYTES = {"fp8": 3.0, "mxfp8": 3.03125, "nvfp4": 4.5625}
#: Reloads that are not timed: processors that were idle run slower at first.
WARM = 5
HIDDEN, KV, INNER = 4096, 1024, 14336
LAYERS = {
    "qkv_proj": (HIDDEN, {"q_proj": HIDDEN, "k_proj": KV, "v_proj": KV}),
    "o_proj": (HIDDEN, {"o_proj": HIDDEN}),
    "gate_up_proj": (HIDDEN, {"gate_proj": INNER, "up_proj": INNER}),
    "down_proj": (INNER, {"down_proj": HIDDEN}),
}


class Linear(nn.Module):
    """A fused layer as engines write it."""

    def __init__(self, method: str, columns: int, parts: dict[str, int], device: str) -> None:
        super().__init__()
        self.parts = parts
        self.quant_method = olq.get_method(method)
        self.quant_method.create_weights(
            self, columns, tuple(parts.values()), dtype=torch.bfloat16, weight_loader=self.load, device=device
        )

    def load(self, parameter: Tensor, tensor: Tensor, shard: str) -> None:
        """Copy one part into its rows."""
        names = list(self.parts)
        start = sum(self.parts[name] for name in names[: names.index(shard)])
        parameter.narrow(0, start, self.parts[shard]).copy_(tensor)


class Model(nn.Module):
    """Layers, and a load_weights with the usual table of fused names."""

    def __init__(self, method: str, layers: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: Linear(method, k, parts, device) for name, (k, parts) in LAYERS.items()})
            for _ in range(layers)
        )
        self.fused = {part: name for name, (_, parts) in LAYERS.items() for part in parts}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Names are layers.<i>.<part>.weight."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            prefix, part, _ = name.rsplit(".", 2)
            parameter = parameters[f"{prefix}.{self.fused[part]}.weight"]
            vars(parameter)["weight_loader"](parameter, tensor, part)


def sources(layers: int, device: str, seed: int) -> dict[str, Tensor]:
    """A checkpoint's linear weights."""
    draw = torch.Generator(device).manual_seed(seed)
    return {
        f"layers.{i}.{part}.weight": torch.randn(rows, k, generator=draw, device=device, dtype=torch.bfloat16)
        for i in range(layers)
        for k, parts in LAYERS.values()
        for part, rows in parts.items()
    }


def reload(model: nn.Module, weights: dict[str, Tensor]) -> olq.Report:
    """One reload from stable sources."""
    with olq.session(model, sources="stable") as session:
        session.load(iter(weights.items()))
        return session.commit()


def same_bytes(method: str, device: str) -> bool:
    """Whether a replayed reload gives the bytes of a fresh load, on one layer."""
    warm, cold = Model(method, 1, device), Model(method, 1, device)
    for seed in (1, 2, 3):
        reload(warm, sources(1, device, seed))
    reload(cold, sources(1, device, 3))
    return olq.fingerprint(warm) == olq.fingerprint(cold)


def timed(call: Callable[[], object]) -> float:
    """Seconds until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate() -> float:
    """Bytes a second, read and written, of a plain copy of 2 GiB."""
    a = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    return 4 * a.numel() / min(timed(lambda: b.copy_(a)) for _ in range(3))


def measure(method: str, layers: int, rounds: int) -> dict[str, object]:
    """Time reloads of the whole model against copies."""
    device = "cuda"
    weights, model = sources(layers, device, 1), Model(method, layers, device)
    first = timed(lambda: reload(model, weights))
    report = reload(model, weights)
    for _ in range(WARM):
        reload(model, weights)
    elements = sum(t.numel() for t in weights.values())
    taken, ratios = [], []
    for _ in range(rounds):
        seconds = timed(lambda: reload(model, weights))
        taken.append(seconds)
        ratios.append(seconds / (BYTES[method] * elements / copy_rate()))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reload(model, weights)
    return {
        "case": f"reload {method}",
        "layers": layers,
        "tensors": len(weights),
        "replayed": report.replayed,
        "ms": statistics.median(taken) * 1e3,
        "first_ms": first * 1e3,
        "times_limit": statistics.median(ratios),
        "times_limit_range": [min(ratios), max(ratios)],
        "extra_bytes": torch.cuda.max_memory_allocated() - before,
        **runner.environment(),
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reload_gpu", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--method", action="append", choices=BYTES, help="default: all")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, help="append lines of JSON to this file")
    chosen = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device")
        return runner.NO_GPU
    for method in chosen.method or BYTES:
        if not same_bytes(method, "cuda"):
            print(f"{method}: NOT TIMED, a replayed reload differs from a fresh load")
            return runner.WRONG
        row = measure(method, chosen.layers, chosen.rounds)
        print(json.dumps(row), flush=True)
        runner.keep(row, chosen.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
