"""From a checkpoint folder to a model that answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import olq

from .config import LlamaConfig
from .model import Llama

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

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


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; needs the package `tokenizers`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
