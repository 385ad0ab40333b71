"""From a checkpoint folder to a model that answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

import olq

from .config import LlamaConfig
from .model import Llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenizers import Tokenizer
    from torch import Tensor

KEEP = olq.QuantConfig(method="keep")


def load_model(
    folder: str | Path,
    quant: olq.QuantConfig = KEEP,
    *,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> tuple[Llama, olq.Report]:
    """Build the model of `folder` and load its weights, quantized as they come.

    Args:
        folder: a Hugging Face checkpoint: config.json and safetensors files, with an index if there are
            several.
        quant: which layer gets which method; nothing is quantized by default.
        progress: called with (bytes done, bytes in all, tensor name).

    Returns:
        The model and olq's report of every layer's decision.
    """
    model = Llama(LlamaConfig.from_folder(folder), quant)
    return model, olq.load(model, folder, progress=progress)


def load_plain(folder: str | Path) -> Llama:
    """The same without olq's loading, in high precision: what `load_model` is measured against."""
    model = Llama(LlamaConfig.from_folder(folder), KEEP)
    model.load_weights(read_checkpoint(folder))
    return model


def read_checkpoint(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder's safetensors files, one at a time, mapped rather than read."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a file handle, no dict
                yield name, tensors.get_tensor(name)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; needs the package `tokenizers`."""
    # Read here: an error of `Tokenizer.from_file` does not say which file.
    text = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)
