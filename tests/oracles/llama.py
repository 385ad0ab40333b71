"""A Llama by its formula, in float32: nothing fused, no cache, one head at a time.

Imports nothing of the engine and nothing of olq.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPES = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def config_json(
    *, tied: bool = True, theta: float = 500.0, dtype: str = "float32", **more: object
) -> dict[str, object]:
    """The config.json of a tiny, awkward model: nothing divides by 16, heads * head_dim is not hidden."""
    rope = {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    return {**SHAPES, **rope, "model_type": "llama", "tie_word_embeddings": tied, "dtype": dtype, **more}


def checkpoint(config: dict[str, object], *, seed: int) -> dict[str, Tensor]:
    """Random tensors by checkpoint name, in the dtype of the config."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        shapes[f"{p}.input_layernorm.weight"] = (hidden,)
        shapes[f"{p}.self_attn.q_proj.weight"] = (q, hidden)
        shapes[f"{p}.self_attn.k_proj.weight"] = (kv, hidden)
        shapes[f"{p}.self_attn.v_proj.weight"] = (kv, hidden)
        shapes[f"{p}.self_attn.o_proj.weight"] = (hidden, q)
        shapes[f"{p}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{p}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{p}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{p}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    dtype = getattr(torch, str(config["dtype"]))
    return {
        name: (torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def save(folder: Path, config: dict[str, object], tensors: dict[str, Tensor], *, shards: int = 3) -> Path:
    """Write a Hugging Face folder: config.json, shards that cut layers, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    where = {
        name: f"model-{i * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def logits(
    config: dict[str, object], tensors: dict[str, Tensor], ids: list[int], *, theta: float = 500.0
) -> Tensor:
    """Float32 logits [T, V] of one sequence, by the words of the formula."""
    w = {name: tensor.float() for name, tensor in tensors.items()}
    d, groups = SHAPES["head_dim"], SHAPES["num_attention_heads"] // SHAPES["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][ids]
    T = len(ids)
    for i in range(SHAPES["num_hidden_layers"]):
        p = f"model.layers.{i}"
        h = _norm(x, w[f"{p}.input_layernorm.weight"])
        q, k, v = (h @ w[f"{p}.self_attn.{n}_proj.weight"].T for n in "qkv")
        heads = []
        for head in range(SHAPES["num_attention_heads"]):
            kv = head // groups
            qh = _rotate(q[:, head * d : (head + 1) * d], theta)
            kh = _rotate(k[:, kv * d : (kv + 1) * d], theta)
            scores = qh @ kh.T / d**0.5
            scores = scores.masked_fill(torch.ones(T, T).triu(1) > 0, float("-inf"))
            heads.append(scores.softmax(-1) @ v[:, kv * d : (kv + 1) * d])
        x = x + torch.cat(heads, dim=-1) @ w[f"{p}.self_attn.o_proj.weight"].T
        h = _norm(x, w[f"{p}.post_attention_layernorm.weight"])
        gate, up = h @ w[f"{p}.mlp.gate_proj.weight"].T, h @ w[f"{p}.mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{p}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return _norm(x, w["model.norm.weight"]) @ w[head].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + SHAPES["rms_norm_eps"]).sqrt() * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Pair (i, i + d/2) of row t turned by t / theta ** (2 i / d)."""
    T, d = x.shape
    out = torch.empty_like(x)
    for t in range(T):
        for i in range(d // 2):
            angle = torch.tensor(t / theta ** (2 * i / d))
            a, b = x[t, i], x[t, i + d // 2]
            out[t, i] = a * angle.cos() - b * angle.sin()
            out[t, i + d // 2] = b * angle.cos() + a * angle.sin()
    return out
