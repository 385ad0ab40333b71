"""A Llama in plain PyTorch, with the fused projections and the loader of a serving engine.

    hidden = embed(ids)
    hidden = hidden + o_proj(attention(rotate(qkv_proj(norm(hidden)))))      in each layer
    hidden = hidden + down_proj(silu(gate) * up), (gate, up) = gate_up_proj(norm(hidden))
    logits = lm_head(norm(hidden))

Module paths are those of the checkpoint, but for the two fused layers, so that a configuration's patterns
read the same for both. Letters as in `layers`, and C = hidden_size, V = vocab_size.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import olq

from .config import LlamaConfig
from .layers import KVCache, Linear, RMSNorm, copy_exactly, rotary_table, rotate

#: Checkpoint name -> fused layer that holds it as a part.
STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class Attention(nn.Module):
    """Grouped-query attention with a rotary embedding."""

    def __init__(self, config: LlamaConfig, index: int, *, label: str, quant: olq.Resolver) -> None:
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.split = (q, kv, kv)
        fused = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        how = {"quant": quant, "dtype": config.dtype}
        self.qkv_proj = Linear(config.hidden_size, fused, label=f"{label}.qkv_proj", **how)
        self.o_proj = Linear(q, {"o_proj": config.hidden_size}, label=f"{label}.o_proj", **how)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache | None) -> Tensor:
        """[B, T, C] to the same."""
        B, T, _ = x_BTC.shape
        parts = self.qkv_proj(x_BTC).split(self.split, dim=-1)
        q_BHTD, k_BGTD, v_BGTD = (part.view(B, T, -1, self.head_dim).transpose(1, 2) for part in parts)
        q_BHTD, k_BGTD = rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BGTD, cos_TD, sin_TD)
        mask = None
        if cache is not None:
            k_BGTD, v_BGTD = cache.extend(self.index, k_BGTD, v_BGTD)
            seen = k_BGTD.shape[2]
            if (
                1 < T < seen
            ):  # several tokens on top of cached ones: the causal triangle does not start at zero
                mask = torch.ones(T, seen, dtype=torch.bool).tril(seen - T)
        causal = mask is None and T > 1
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BGTD, v_BGTD, attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        return self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: LlamaConfig, *, label: str, quant: olq.Resolver) -> None:
        super().__init__()
        inner, outer = config.intermediate_size, config.hidden_size
        how = {"quant": quant, "dtype": config.dtype}
        fused = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(outer, fused, label=f"{label}.gate_up_proj", **how)
        self.down_proj = Linear(inner, {"down_proj": outer}, label=f"{label}.down_proj", **how)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] to the same."""
        gate, up = self.gate_up_proj(x_BTC).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each on a normed input and added to the stream."""

    def __init__(self, config: LlamaConfig, index: int, *, label: str, quant: olq.Resolver) -> None:
        super().__init__()
        norm = {"eps": config.rms_norm_eps, "dtype": config.dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, index, label=f"{label}.self_attn", quant=quant)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, label=f"{label}.mlp", quant=quant)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache | None) -> Tensor:
        """[B, T, C] to the same."""
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_TD, sin_TD, cache)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))


class Decoder(nn.Module):
    """Embedding, layers, norm: what a checkpoint calls `model`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig, *, quant: olq.Resolver) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, label=f"model.layers.{i}", quant=quant)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=config.dtype)
        cos, sin = rotary_table(config.head_dim, config.max_position_embeddings, theta=config.rope_theta)
        self.register_buffer("cos", cos.to(config.dtype), persistent=False)
        self.register_buffer("sin", sin.to(config.dtype), persistent=False)

    def forward(self, ids_BT: Tensor, cache: KVCache | None) -> Tensor:
        """Token ids to normed hidden states, [B, T, C]."""
        start, T = cache.length if cache else 0, ids_BT.shape[1]
        if start + T > len(self.cos):
            raise ValueError(
                f"the model was trained for {len(self.cos)} positions, this call reaches {start + T}"
            )
        cos_TD, sin_TD = self.cos[start : start + T], self.sin[start : start + T]
        x_BTC = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC, cos_TD, sin_TD, cache)
        if cache is not None:
            cache.advance(T)
        return self.norm(x_BTC)


class Llama(nn.Module):
    """A causal language model, ready for its weights.

    Args:
        config: the model's shapes.
        quant: which layer gets which method; `keep` everywhere makes a plain model.

    Quantized weights are parameters on the meta device until they are loaded, everything else has its memory
    from here on. With tied embeddings the head is the embedding, in high precision, and there is no layer
    `lm_head`.
    """

    def __init__(self, config: LlamaConfig, quant: olq.QuantConfig) -> None:
        super().__init__()
        resolver = olq.Resolver(quant)
        self.config = config
        self.model = Decoder(config, quant=resolver)
        self.lm_head = None
        if not config.tie_word_embeddings:
            parts = {"lm_head": config.vocab_size}
            self.lm_head = Linear(
                config.hidden_size, parts, label="lm_head", quant=resolver, dtype=config.dtype
            )
        resolver.see({"lm_head", *(name for name, _ in self.named_modules())})
        resolver.finish()
        self.eval().requires_grad_(False)

    def forward(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids to logits, [B, T, V], in the model's dtype. With a cache, they go on behind it."""
        hidden_BTC = self.model(ids_BT, cache)
        if self.lm_head is not None:
            return self.lm_head(hidden_BTC)
        return F.linear(hidden_BTC, self.model.embed_tokens.weight)

    def new_cache(self, sequences: int, tokens: int) -> KVCache:
        """Room for `tokens` tokens in each of `sequences` sequences."""
        c = self.config
        return KVCache(
            c.num_hidden_layers, (sequences, c.num_key_value_heads, tokens, c.head_dim), dtype=c.dtype
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy checkpoint tensors to where they belong.

        Args:
            weights: (checkpoint name, tensor), in any order.

        Returns:
            The names of the parameters that were written.

        Raises:
            ValueError: a name that this model does not have, or a tensor of another shape.
        """
        parameters = dict(self.named_parameters())
        written: set[str] = set()
        for name, tensor in weights:
            layer, _, leaf = name.rpartition(".")
            if layer == "lm_head" and self.lm_head is None:
                layer = "model.embed_tokens"  # some checkpoints of tied models hold both
            parent, _, part = layer.rpartition(".")
            target = f"{parent}.{STACKED[part]}.{leaf}" if part in STACKED else f"{layer}.{leaf}"
            if target not in parameters:
                raise ValueError(f"this model has no parameter for {name!r}")
            parameter = parameters[target]
            getattr(parameter, "weight_loader", copy_exactly)(parameter, tensor, part)
            written.add(target)
        return written
