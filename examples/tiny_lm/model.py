"""A small Llama in plain PyTorch, with the module names of Hugging Face's ``LlamaForCausalLM``.

Promises:
    ``TinyLlama(config)`` computes the same logits as ``LlamaForCausalLM`` with the same weights, and its
    parameter names are the tensor names of a Llama checkpoint, so such a folder loads by name.
    Every projection is called as a module, so another that maps [..., K] to [..., N] can take its place.
Letters:
    B sequences, T positions, H hidden size, F intermediate size, V vocabulary, D head size,
    A query heads, G key and value heads (A a multiple of G; each serves A / G query heads).
Equation, for each layer:
    x = x + o_proj(attention(q_proj(n), k_proj(n), v_proj(n))) with n = input_layernorm(x)
    x = x + down_proj(silu(gate_proj(m)) * up_proj(m))         with m = post_attention_layernorm(x)
    logits = lm_head(norm(x)); lm_head shares the weight of embed_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TinyConfig:
    """The sizes of the model; the names are those of a Llama ``config.json``.

    Several are awkward on purpose: 320 and 608 are no multiples of 128, and 1500 is none of 16.
    """

    vocab_size: int = 1500
    hidden_size: int = 320
    intermediate_size: int = 608
    num_hidden_layers: int = 4
    num_attention_heads: int = 10
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H] in the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with A query heads over G key and value heads and rotary positions."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, H] to [B, T, H]; ``cosine`` and ``sine`` are [T, D]."""
        query = rotate(self._heads(self.q_proj(x)), cosine, sine)
        key = rotate(self._heads(self.k_proj(x)), cosine, sine)
        value = self._heads(self.v_proj(x))
        key = key.repeat_interleave(self.group, dim=1)
        value = value.repeat_interleave(self.group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward part: down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer block: attention and feed-forward, each normed first and added to its input."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[B, T, H] to [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and last norm: the part called ``model`` in a checkpoint."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] token numbers to [B, T, H]."""
        x = self.embed_tokens(tokens)
        cosine, sine = rotary_tables(self.config, tokens.shape[-1], tokens.device)
        cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.norm(x)


class TinyLlama(nn.Module):
    """The whole model; ``lm_head.weight`` is the same Parameter as ``model.embed_tokens.weight``."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] token numbers to logits [B, T, V], T at most ``max_position_embeddings``."""
        return self.lm_head(self.model(tokens))

    def initialise_(self, seed: int) -> None:
        """Draw all matrices from N(0, 0.02^2); those that end a branch are smaller by sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5 if ends_branch else 0.02
                drawn = torch.randn(parameter.shape, generator=generator) * spread
                parameter.data.copy_(drawn)


def rotary_tables(config: TinyConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i / D), float32 [T, D]; both halves of D are alike."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    position = torch.arange(length, dtype=torch.float32, device=device)
    angle = torch.outer(position, config.rope_theta**-exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D / 2]) by its angle: the half-split order of a Llama checkpoint."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
