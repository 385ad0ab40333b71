"""The tokenizer: byte-level BPE, kept in a ``tokenizer.json`` that Hugging Face tools read.

Promises:
    Every text has tokens and decodes to itself; no unknown token is needed.
    Token 0 is ``<|endoftext|>``; it stands before every document.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from data import Document
    from torch import Tensor

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Learn ``vocab_size`` tokens: the end of text, 256 bytes, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one row of int64 token numbers, an end-of-text token before each."""
    rows = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        rows.append(torch.tensor([0, *encoding.ids]))
    return torch.cat(rows)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write ``tokenizer.json`` and the ``tokenizer_config.json`` that ``AutoTokenizer`` asks for."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
