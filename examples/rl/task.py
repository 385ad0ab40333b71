"""The task: after `def name(`, finish a function header whose arguments and result all have types.

    0      no header that Python's own parser accepts, or one without arguments       def load(self):
    1/3    the share of arguments and result that have an annotation                  def load(path, mode: str):
    1                                                                                 def load(path: str) -> bytes:

Nothing is learned from examples: the reward is computed from the text alone.
"""

import ast
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: With `def ` and the bracket, each is four tokens of tiny_lm: a batch needs no padding.
NAMES = (
    *("build", "close", "count", "decode", "encode", "find", "insert", "join", "load", "make"),
    *("next", "parse", "remove", "save", "send", "sort", "stop", "update", "write"),
)


def reward(text: str) -> float:
    """0 to 1 for a prompt with its continuation; only the first line counts, and it must have an end."""
    line, end, _ = text.partition("\n")
    if not end or not line.endswith(":"):
        return 0.0
    try:
        body = ast.parse(f"{line} pass").body
    except (SyntaxError, ValueError):  # ValueError: a NUL character
        return 0.0
    match body:
        case [ast.FunctionDef(args=ast.arguments() as arguments, returns=returns)]:
            args = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            typed = [arg.annotation is not None for arg in args if arg.arg != "self"]
            return fmean([*typed, returns is not None]) if typed else 0.0
    return 0.0


def prompts(tokenizer: "Tokenizer") -> Tensor:
    """All prompts as token ids, [len(NAMES), L], int64."""
    return torch.tensor([tokenizer.encode(f"def {name}(").ids for name in NAMES])


def ends(tokenizer: "Tokenizer", eos: tuple[int, ...]) -> Tensor:
    """Which tokens end a continuation, [V], bool: end-of-sequence, and those with a line break in them."""
    return torch.tensor(
        [i in eos or "\n" in tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    )
