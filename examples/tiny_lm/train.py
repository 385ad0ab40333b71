"""Train the two tiny checkpoints: A on Python text, then B from A on C and C++ headers.

Run:
    python examples/tiny_lm/train.py --out DIR                                        (a GPU; minutes)
    python examples/tiny_lm/train.py --out DIR --steps-a 20 --steps-b 10 --batch 8    (a trial on a CPU)
Writes:
    DIR/checkpoint_a, DIR/checkpoint_b    Llama folders, with training.json
    DIR/heldout_a.txt, DIR/heldout_b.txt  the text that was held out
Equation:
    loss = mean of -log p(next token); AdamW; the rate rises for 200 steps, then falls as a cosine to a tenth.
    Each batch holds a fixed number of rows of each group of text, cut at random places.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from checkpoint import load_checkpoint, save_checkpoint
from data import gather
from evaluate import mean_loss
from model import TinyConfig, TinyLlama
from tokens import encode, save_tokenizer, train_tokenizer
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WARM_UP = 200
RECORDS = 40


@dataclass(frozen=True)
class Stage:
    """One run of training: ``rows`` per batch from each group, and the optimizer's settings."""

    rows: dict[str, int]
    steps: int
    rate: float
    seed: int
    weight_decay: float
    length: int = 512
    betas: tuple[float, float] = (0.9, 0.95)
    largest_gradient: float = 1.0


def rate_at(step: int, stage: Stage) -> float:
    """The learning rate of a step: linear rise, then a cosine down to a tenth."""
    rise = min(WARM_UP, stage.steps // 4)
    if step < rise:
        return stage.rate * (step + 1) / rise
    progress = (step - rise) / max(1, stage.steps - rise)
    return stage.rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def draw(groups: dict[str, Tensor], stage: Stage, generator: torch.Generator) -> Tensor:
    """A batch [sum of rows, length + 1] of token numbers, on the device of the groups."""
    rows = []
    for name, count in stage.rows.items():
        tokens = groups[name]
        starts = torch.randint(len(tokens) - stage.length, (count,), generator=generator)
        places = (starts[:, None] + torch.arange(stage.length + 1)).to(tokens.device, non_blocking=True)
        rows.append(tokens[places])
    return torch.cat(rows)


def batch_loss(model: TinyLlama, batch: Tensor) -> Tensor:
    """Mean loss of a batch [B, T + 1]; the matrix products run in bfloat16."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def run_stage(
    model: TinyLlama,
    groups: dict[str, Tensor],
    heldout: dict[str, Tensor],
    stage: Stage,
    loss_of: Callable[[Tensor], Tensor],
) -> list[dict[str, float]]:
    """Train ``model`` in place; returns the loss curve, about 40 points of training and held-out losses."""
    generator = torch.Generator().manual_seed(stage.seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": stage.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=stage.rate,
        betas=stage.betas,
        fused=matrices[0].is_cuda,
    )
    curve = []
    every = max(1, stage.steps // RECORDS)
    passed = torch.zeros((), device=matrices[0].device)
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, stage)
        loss = loss_of(draw(groups, stage, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), stage.largest_gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        passed += loss.detach()
        if (step + 1) % every == 0:
            point = {"step": step + 1, "training": passed.item() / every}
            point |= {name: mean_loss(model, tokens) for name, tokens in heldout.items()}
            curve.append({name: round(value, 4) for name, value in point.items()})
            print(curve[-1], flush=True)
            passed.zero_()
    return curve


def main() -> None:
    """Read the command line, gather text, train A, then B, and write everything."""
    parser = argparse.ArgumentParser(description="Train the tiny checkpoints.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps-a", type=int, default=4000)
    parser.add_argument("--steps-b", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64, help="rows of 512 tokens, a multiple of 8")
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--library", type=Path, help="folder of the standard library; default: this Python's")
    parser.add_argument("--include", type=Path, help="folder of Python's headers; default: this Python's")
    parser.add_argument("--torch", type=Path, help="folder of the package torch; default: this PyTorch's")
    parser.add_argument("--no-compile", action="store_true", help="don't use torch.compile on a GPU")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    corpus = gather(options.library, options.include, options.torch)
    config = TinyConfig()
    # PyTorch's Python files would outweigh all the rest in the choice of tokens.
    learned = [d for name, documents in corpus.groups.items() if name != "torch_python" for d in documents]
    tokenizer = train_tokenizer(learned, config.vocab_size)
    groups = {
        name: encode(tokenizer, [d.text for d in documents]).to(device)
        for name, documents in corpus.groups.items()
        if documents
    }
    heldout = {
        "heldout_a": encode(tokenizer, [corpus.heldout_a]).to(device),
        "heldout_b": encode(tokenizer, [corpus.heldout_b]).to(device),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "heldout_a.txt").write_text(corpus.heldout_a, "utf-8")
    (options.out / "heldout_b.txt").write_text(corpus.heldout_b, "utf-8")
    print({name: len(tokens) for name, tokens in (groups | heldout).items()}, flush=True)
    print(f"text ready after {time.perf_counter() - began:.0f} s", flush=True)

    model = TinyLlama(config).to(device)
    model.initialise_(options.seed)
    eighth = options.batch // 8
    rows_a = {"library": 3 * eighth, "tests": 2 * eighth, "torch_python": 3 * eighth}
    if "tests" not in groups:  # many systems ship Python without its test suite
        rows_a = {"library": 4 * eighth, "torch_python": 4 * eighth}
    rows_b = {"headers": 2 * eighth, "torch_headers": 6 * eighth}
    stage_a = Stage(rows_a, options.steps_a, 3e-3, options.seed + 1, options.weight_decay)
    stage_b = Stage(rows_b, options.steps_b, 1e-3, options.seed + 2, options.weight_decay)

    def loss_of(batch: Tensor) -> Tensor:
        return batch_loss(model, batch)

    if device.type == "cuda" and not options.no_compile:
        loss_of = torch.compile(loss_of)

    for letter, stage in (("a", stage_a), ("b", stage_b)):
        began = time.perf_counter()
        print(f"stage {letter}", flush=True)
        curve = run_stage(model, groups, heldout, stage, loss_of)
        seconds = time.perf_counter() - began
        folder = options.out / f"checkpoint_{letter}"
        save_checkpoint(model, folder)
        save_tokenizer(tokenizer, folder, config.max_position_embeddings)
        saved = load_checkpoint(folder).to(device)
        final = {name: round(math.exp(mean_loss(saved, tokens)), 4) for name, tokens in heldout.items()}
        record = {
            "stage": asdict(stage),
            "initial_seed": options.seed,
            "starts_from": "checkpoint_a" if letter == "b" else "random weights",
            "text": corpus.summary(),
            "tokens": {name: len(tokens) for name, tokens in (groups | heldout).items()},
            "perplexity": final,
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "loss_curve": curve,
        }
        (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        print(f"checkpoint_{letter}: perplexity {final}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
