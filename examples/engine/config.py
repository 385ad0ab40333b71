"""What a Llama is made of, as the `config.json` of a Hugging Face checkpoint tells it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shapes and constants of one model; names as in `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def from_folder(cls, folder: str | Path) -> "LlamaConfig":
        """Read `folder/config.json`."""
        return cls.from_json(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "LlamaConfig":
        """Take what this engine knows, and refuse a model that it would compute wrongly.

        Raises:
            ValueError: another architecture or activation, biases, or a scaled rotary embedding.
        """
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # new and old spelling
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        needs = {
            "model_type": (raw.get("model_type", "llama"), "llama"),
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "rope_type": (rope_type, "default"),
            "attention_bias": (raw.get("attention_bias", False), False),
            "mlp_bias": (raw.get("mlp_bias", False), False),
        }
        for key, (found, need) in needs.items():
            if found != need:
                raise ValueError(f"config.json: this engine needs {key} = {need!r}, the model has {found!r}")
        heads = raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position_embeddings=raw.get("max_position_embeddings", cls.max_position_embeddings),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or cls.rope_theta,
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            dtype=DTYPES[raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"],
        )
