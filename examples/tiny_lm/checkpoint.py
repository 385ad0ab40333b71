"""A checkpoint folder in the Hugging Face Llama layout: ``config.json`` and safetensors shards with an index.

Promises:
    Tensors are bfloat16 and contiguous, with q, k, v and gate, up apart.
    There is no ``lm_head.weight`` on disk: it is ``model.embed_tokens.weight``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import torch
from model import TinyConfig, TinyLlama
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"
SHARDS = 3


def save_checkpoint(model: TinyLlama, folder: Path) -> None:
    """Round the weights to bfloat16 and write them in three shards of about equal size.

    The cuts fall where the sizes say, so that a layer, and its q, k and v, may lie in two files.
    """
    tensors = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    before = 0
    for name, tensor in tensors.items():
        shards[min(before * SHARDS // total, SHARDS - 1)][name] = tensor
        before += tensor.nbytes

    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    (folder / "config.json").write_text(json.dumps(_config(model.config), indent=2) + "\n", "utf-8")


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> TinyLlama:
    """Build the model a folder describes and read its weights, as ``dtype``, into it.

    Raises:
        RuntimeError: a tensor is missing, unknown or of another shape (from ``load_state_dict``).
    """
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    model = TinyLlama(TinyConfig(**{f.name: settings[f.name] for f in fields(TinyConfig)})).to(dtype)
    index = json.loads((folder / INDEX).read_text("utf-8"))
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors.update(load_file(folder / file))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.eval()


def _config(config: TinyConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(config),
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
