"""What olq itself costs for each tensor of a reload: through its loader, and replayed.

    python -m benchmarks.replay [--layers 60] [--rounds 7] [--check]

A model of small fused layers is reloaded through weight loaders with shard ids. First the bytes of a replayed reload
against a fresh load's; if they differ nothing is timed. Then rounds of three reloads each: every tensor through its
loader and the counter, replayed at once, and replayed through the queue, its append and its flush. The method's
`quantize_` and the plain copies do nothing while the clock runs: what is left is olq's own work. Medians over the
rounds of the mean over the tensors, in microseconds of CPU, and the ratio of the first to each.

Exit status: 1 if bytes differ; 3 with --check if a replay costs 15 microseconds or more, or is less than 5 times
cheaper than a counted call; else 0.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import olq

MOST_US, LEAST_RATIO = 15.0, 5.0
SHARDS = {"q": (0, 64), "k": (64, 16), "v": (80, 16)}


class Layer(nn.Module):
    """A fused projection as an engine writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = olq.get_method("fp8", granularity="channel")
        self.quant_method.create_weights(
            self, 64, (64, 16, 16), dtype=torch.bfloat16, weight_loader=self.load_shard
        )

    def load_shard(self, parameter: Tensor, tensor: Tensor, shard: str) -> None:
        """Copy one shard into its rows."""
        start, rows = SHARDS[shard]
        parameter.narrow(0, start, rows).copy_(tensor)


def make_model(layers: int) -> nn.Module:
    """`layers` fused layers without weights."""
    return nn.Sequential(*(Layer() for _ in range(layers)))


def make_weights(layers: int, seed: int) -> list[tuple[str, str, Tensor]]:
    """(name, shard, tensor) of every shard."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (f"{i}.weight", shard, torch.randn(rows, 64, generator=draw).bfloat16())
        for i in range(layers)
        for shard, (_, rows) in SHARDS.items()
    ]


def reload(model: nn.Module, weights: list[tuple[str, str, Tensor]], **options: object) -> float:
    """One reload; returns microseconds of this thread's CPU a tensor, from the first feed to the end of the flush."""
    with olq.session(model, **options) as session:  # pyright: ignore[reportArgumentType]
        start = time.thread_time()
        for name, shard, tensor in weights:
            session.feed(name, tensor, shard)
        session.flush()
        taken = time.thread_time() - start
    return taken / len(weights) * 1e6


@contextmanager
def nothing_quantized(model: nn.Module) -> Iterator[None]:
    """The method does nothing, so that only olq's own work is left."""
    kind = type(model[0].quant_method)  # pyright: ignore[reportIndexIssue]
    before = kind.quantize_
    kind.quantize_ = lambda *_: True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        kind.quantize_ = before


def same_bytes(layers: int) -> bool:
    """Whether a replayed reload gives the bytes of a fresh load."""
    replayed, fresh = make_model(layers), make_model(layers)
    for seed in (1, 2, 3):
        reload(replayed, make_weights(layers, seed), sources="stable" if seed == 3 else "transient")
    reload(fresh, make_weights(layers, 3))
    return olq.fingerprint(replayed).digests == olq.fingerprint(fresh).digests


def main(argv: list[str] | None = None) -> int:
    """Run, print, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not same_bytes(chosen.layers):
        print("NOT TIMED: a replayed reload differs from a fresh load")
        return 1
    model, weights = make_model(chosen.layers), make_weights(chosen.layers, 1)
    reload(model, weights)
    kinds: dict[str, dict[str, object]] = {
        "counted": {"replay": False},
        "replayed": {},
        "replayed, queued": {"sources": "stable"},
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with nothing_quantized(model):
        for _ in range(chosen.rounds):
            for name, options in kinds.items():
                times[name].append(reload(model, weights, **options))
    print(f"{len(weights)} tensors, one thread, torch {torch.__version__}")
    missed = False
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["counted"], taken, strict=True))
        median = statistics.median(taken)
        print(f"{name:18} {median:7.1f} us a tensor   counted / this: {ratio:5.1f}")
        missed |= name != "counted" and (median >= MOST_US or ratio < LEAST_RATIO)
    if missed:
        print(
            f"target missed: under {MOST_US:g} us, and at least {LEAST_RATIO:g} times less than a counted call"
        )
    return 3 if missed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
