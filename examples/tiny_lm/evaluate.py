"""Perplexity of both checkpoints on both held-out texts, and text that they write.

Run:
    python examples/tiny_lm/evaluate.py
    python examples/tiny_lm/evaluate.py --sample "def read(self, path):"
Equation:
    perplexity = exp(mean over tokens of -log p(token | the tokens before it in its window))
    The text is cut in windows of 512 predicted tokens; the first token of all is the end-of-text token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from checkpoint import load_checkpoint
from tokenizers import Tokenizer
from tokens import encode
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HERE = Path(__file__).parent
WINDOW = 512
BATCH = 16


@torch.inference_mode()
def mean_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    """Mean of -log p in nats over all tokens but the first.

    Args:
        model: maps token numbers [B, T] to logits [B, T, V].
        tokens: int64 [N], on the device of the model.

    Returns:
        The mean; logits are taken to float32, sums are kept in float64.
    """
    total = 0.0
    full = (len(tokens) - 1) // WINDOW
    batches = [tokens[: full * WINDOW].view(full, WINDOW)[i : i + BATCH] for i in range(0, full, BATCH)]
    targets = [tokens[1 : full * WINDOW + 1].view(full, WINDOW)[i : i + BATCH] for i in range(0, full, BATCH)]
    if full * WINDOW < len(tokens) - 1:
        batches.append(tokens[None, full * WINDOW : -1])
        targets.append(tokens[None, full * WINDOW + 1 :])
    for batch, target in zip(batches, targets, strict=True):
        logits = model(batch).float().flatten(0, 1)
        total += F.cross_entropy(logits, target.flatten(), reduction="none").double().sum().item()
    return total / (len(tokens) - 1)


@torch.inference_mode()
def write(
    model: Callable[[Tensor], Tensor], start: Tensor, length: int, temperature: float, seed: int
) -> Tensor:
    """Continue int64 ``start`` [N] by ``length`` tokens, drawn at ``temperature``; 0 takes the likeliest."""
    generator = torch.Generator(start.device).manual_seed(seed)
    tokens = start
    for _ in range(length):
        logits = model(tokens[None, -WINDOW:])[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax()[None]
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, chosen))
    return tokens


def main() -> None:
    """Read the command line, print the table or a sample."""
    parser = argparse.ArgumentParser(description="Perplexity of the tiny checkpoints, or text they write.")
    parser.add_argument("--folder", type=Path, default=HERE, help="where checkpoint_a and heldout_a.txt are")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sample", metavar="START", help="print how each checkpoint goes on after START")
    parser.add_argument("--length", type=int, default=160, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(options.folder / "checkpoint_a" / "tokenizer.json"))
    if options.sample is None:
        print("| checkpoint | heldout_a.txt | heldout_b.txt |\n| --- | --- | --- |")
    for name in ("checkpoint_a", "checkpoint_b"):
        model = load_checkpoint(options.folder / name).to(options.device)
        if options.sample is not None:
            start = encode(tokenizer, [options.sample]).to(options.device)
            written = write(model, start, options.length, options.temperature, options.seed)
            print(f"--- {name}\n{tokenizer.decode(written.tolist())}\n")
            continue
        row = []
        for text in ("heldout_a.txt", "heldout_b.txt"):
            tokens = encode(tokenizer, [(options.folder / text).read_text("utf-8")]).to(options.device)
            row.append(math.exp(mean_loss(model, tokens)))
        print(f"| {name} | {row[0]:.3f} | {row[1]:.3f} |")


if __name__ == "__main__":
    main()
