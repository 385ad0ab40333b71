"""Load a checkpoint with a method and let it answer.

python -m examples.engine --model examples/tiny_lm/checkpoint_a --method mxfp8 --prompt "def main("
"""

import argparse
import json
import sys
import time
from typing import Any

from tqdm import tqdm

import olq

from .generate import generate
from .loader import load_model, load_tokenizer
from .told import told


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.engine", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument(
        "--model", required=True, help="checkpoint folder: config.json, safetensors, tokenizer.json"
    )
    parser.add_argument("--prompt", required=True, help="text to continue")
    what = parser.add_argument_group("quantization")
    what.add_argument(
        "--method", default="keep", help="fp8, mxfp8, nvfp4, ...; keep (the default) loads as it is"
    )
    what.add_argument(
        "--param", action="append", default=[], metavar="KEY=VALUE", help="of the method; repeatable"
    )
    what.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="layers in high precision"
    )
    what.add_argument(
        "--config", metavar="FILE", help="a whole configuration, JSON or TOML, instead of the above"
    )
    what.add_argument("--report", action="store_true", help="print each layer's decision with its reason")
    how = parser.add_argument_group("generation")
    how.add_argument("--max-new-tokens", type=int, default=100)
    how.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def parameter(text: str) -> tuple[str, Any]:
    """`granularity=block` or `power_of_two=true` to a pair; what is not JSON is a string."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    """Load, generate, print."""
    args = arguments()
    if args.config:
        quant = olq.QuantConfig.from_file(args.config)
    else:
        quant = olq.QuantConfig(
            method=args.method, params=dict(map(parameter, args.param)), keep=tuple(args.keep)
        )
    with tqdm(unit="B", unit_scale=True, desc="loading", leave=False, disable=None) as bar:

        def progress(done: int, total: int | None, name: str) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model, report = load_model(args.model, quant, progress=progress)
    if args.report:
        print(report.table(), file=sys.stderr)

    tokenizer = load_tokenizer(args.model)
    prompt = tokenizer.encode(args.prompt).ids
    how = {"temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    print(args.prompt, end="", flush=True)
    made: list[int] = []
    shown, start = "", time.perf_counter()
    for token in generate(model, prompt, max_new_tokens=args.max_new_tokens, **how):
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may be cut into several tokens
            print(text[len(shown) :], end="", flush=True)
            shown = text
    seconds = time.perf_counter() - start
    print(f"\n[{len(made)} tokens, {len(made) / seconds:.1f} a second]", file=sys.stderr)


if __name__ == "__main__":
    with told():
        main()
