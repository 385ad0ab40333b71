"""Load a small language model with every method, show what each costs, and reload it while it runs.

python -m examples.demo [--short] [--out build/demo]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from examples.engine import Llama, LlamaConfig, generate, load_tokenizer, read_checkpoint
from examples.engine.loader import KEEP
from olq import QuantConfig, load
from olq.testing.memory import MemoryTrace, measure_memory

from .measure import Row, Work, measure, table
from .plot import marked, memory_plot
from .reload import reload

TINY_LM = Path(__file__).resolve().parents[1] / "tiny_lm"

#: The method of the text, the reload and the plot.
SHOWN, SHOWN_QUANT = "nvfp4", QuantConfig(method="nvfp4")
METHODS: dict[str, QuantConfig | None] = {
    "bf16": None,
    "fp8 tensor": QuantConfig(method="fp8", params={"granularity": "tensor"}),
    "fp8 channel": QuantConfig(method="fp8", params={"granularity": "channel"}),
    "fp8 block": QuantConfig(method="fp8", params={"granularity": "block"}),
    "fp8 block, 2^n scales": QuantConfig(
        method="fp8", params={"granularity": "block", "scale": "power_of_two"}
    ),
    "mxfp8": QuantConfig(method="mxfp8"),
    SHOWN: SHOWN_QUANT,
}
SHORT = ("bf16", "fp8 channel", SHOWN)
TEXTS = {"Python": "heldout_a.txt", "C headers": "heldout_b.txt"}
PROMPT = "def read_lines(path, encoding="


class Bar:
    """One progress bar for everything, moved by the share of each stage that is done.

    Args:
        rows: parts of equal length; the shares of the stages in one part add up to 1.
    """

    def __init__(self, rows: int) -> None:
        self._bar = tqdm(
            total=rows, bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}", leave=False, disable=None
        )
        self._end = 0.0

    def stage(self, what: str, share: float) -> Callable[[float], None]:
        """Begin a stage; the result is to be called with how much of it is done, from 0 to 1."""
        start, self._end = self._end, self._end + share
        self._bar.set_description_str(what)
        return partial(self._move, start, share)

    def _move(self, start: float, share: float, done: float) -> None:
        self._bar.update(min(start + share * done, self._bar.total) - self._bar.n)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()


def trace_of_load(folder: Path, quant: QuantConfig | None) -> MemoryTrace:
    """Memory while a checkpoint loads, with a mark for each of its tensors."""

    def call() -> Llama:
        model = Llama(LlamaConfig.from_folder(folder), quant or KEEP)
        weights = marked(read_checkpoint(folder))
        if quant is None:
            model.load_weights(weights)
        else:
            load(model, weights)
        return model

    return measure_memory(call)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo; progress goes to standard error, results to standard output."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=str(__doc__).splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer methods, less text")
    parser.add_argument("--model", type=Path, default=TINY_LM, help="folder of both checkpoints and texts")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the plot")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    a, b = args.model / "checkpoint_a", args.model / "checkpoint_b"
    methods = {name: METHODS[name] for name in SHORT} if args.short else METHODS
    new_tokens = 20 if args.short else 40

    tokenizer = load_tokenizer(a)
    prompt = tokenizer.encode(PROMPT).ids
    texts = {
        name: tokenizer.encode((args.model / file).read_text("utf-8")).ids for name, file in TEXTS.items()
    }
    if args.short:
        texts = {name: ids[:2000] for name, ids in texts.items()}

    bar = Bar(len(methods) + 1)
    rows: list[Row] = []
    models: dict[str, Llama] = {}
    for name, quant in methods.items():
        work = Work(text=texts["Python"], prompt=prompt, new_tokens=new_tokens, stage=bar.stage)
        row, models[name] = measure(name, quant, a, work)
        rows.append(row)
    model = models[SHOWN]
    written = generate(model, prompt, max_new_tokens=60, temperature=0.5, top_p=0.9)
    text = tokenizer.decode(list(written))
    reloaded = reload(model, SHOWN_QUANT, b, texts=texts, stage=bar.stage)
    plot = args.out / "memory.png"
    memory_plot({name: trace_of_load(a, METHODS[name]) for name in ("bf16", SHOWN)}, plot)
    bar.close()

    print(f"{a.name} of {args.model.name}, perplexity over {len(texts['Python']):,} tokens of Python\n")
    print(table(rows))
    print(f"\n--- {SHOWN} goes on from {PROMPT!r} ---\n{PROMPT}{text}\n---\n")
    print(f"{b.name} into the running {SHOWN} model:\n{reloaded}\n")
    print(f"memory while loading, layer by layer: {plot}")
    print(f"{time.perf_counter() - start:.0f} seconds in all")


if __name__ == "__main__":
    # One thread: the matrices are too small for more, and the figures don't depend on what else runs.
    torch.set_num_threads(1)
    main()
