"""How well a model predicts a text: exp of the mean negative log-likelihood a token."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from .model import Llama


@torch.inference_mode()
def perplexity(
    model: Llama,
    ids: Sequence[int],
    *,
    window: int = 256,
    batch: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Perplexity of `ids`, cut into windows that do not see each other.

    Args:
        model: loaded.
        ids: token ids of the text, at least two.
        window: tokens predicted in one window; each window also sees the token before its first.
        batch: windows computed together.
        progress: called with (tokens done, tokens in all).

    Returns:
        The perplexity; every token but the first is predicted exactly once. Log-likelihoods are float32,
        their sum float64.
    """
    if len(ids) < 2:
        raise ValueError(f"perplexity needs at least two tokens, the text has {len(ids)}")
    tokens = torch.tensor(ids)
    total, loss = len(ids) - 1, 0.0
    whole = total // window * window
    groups = list(tokens[: whole + 1].unfold(0, window + 1, window).split(batch)) if whole else []
    if whole < total:
        groups.append(tokens[whole:][None])
    done = 0
    for group_BT in groups:
        logits_NV = model(group_BT[:, :-1]).flatten(0, 1).float()
        targets_N = group_BT[:, 1:].flatten()
        loss += F.cross_entropy(logits_NV, targets_N, reduction="none").double().sum().item()
        done += targets_N.numel()
        if progress is not None:
            progress(done, total)
    return math.exp(loss / total)
