"""Any Llama checkpoint of Hugging Face with every method: size, peak memory, perplexity, speed, an answer.

python -m examples.compare --model DIR [--text FILE] [--tokens 2048] [--prompt TEXT]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from examples.demo.__main__ import METHODS
from examples.demo.measure import Row, Work, measure, table
from examples.engine import generate, load_tokenizer
from examples.engine.told import told

HELD_OUT = Path(__file__).parent / "tiny_lm" / "heldout_a.txt"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table and an answer of each method."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.compare", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="text whose perplexity is measured")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of it")
    parser.add_argument("--prompt", default="The capital of France is", help="text to continue")
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args(arguments)

    tokenizer = load_tokenizer(args.model)
    prompt = tokenizer.encode(args.prompt).ids
    text = tokenizer.encode(args.text.read_text(encoding="utf-8")).ids[: args.tokens]
    rows: list[Row] = []
    answers: list[str] = []
    with tqdm(
        total=len(METHODS),
        bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}",
        leave=False,
        disable=None,
    ) as bar:

        def stage(what: str, share: float):
            bar.set_description_str(what)
            return lambda done: None

        for name, quant in METHODS.items():
            work = Work(text=text, prompt=prompt, new_tokens=4, stage=stage)
            row, model = measure(name, quant, args.model, work)
            rows.append(row)
            answers.append(tokenizer.decode(list(generate(model, prompt, max_new_tokens=args.new_tokens))))
            del model
            bar.update(1)
    print(f"{args.model.name}, perplexity over {len(text):,} tokens of {args.text.name}\n")
    print(table(rows))
    print(f"\n{args.prompt!r} goes on")
    for row, answer in zip(rows, answers, strict=True):
        print(f"  {row.name.ljust(22)} {answer!r}")


if __name__ == "__main__":
    # One thread: the figures don't depend on what else runs.
    torch.set_num_threads(1)
    with told():
        main()
