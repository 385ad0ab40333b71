"""Generation, one token at a time: greedy, or sampled from the most likely tokens."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .model import Llama


@torch.inference_mode()
def generate(
    model: Llama,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Continue a prompt; each token is yielded as soon as it is known.

    Args:
        model: loaded.
        prompt: token ids, at least one.
        max_new_tokens: the most that are made; the model's end-of-sequence token ends earlier and is not
            yielded.
        temperature: 0 takes the most likely token, greater values sample, 1 from the model's own
            distribution.
        top_p: sample only from the fewest tokens that have this probability together.
        seed: of the sampling; equal seeds give equal tokens.

    Yields:
        Token ids.
    """
    if not prompt:
        raise ValueError("generation starts from at least one token, and the prompt has none")
    if temperature < 0.0 or not 0.0 < top_p <= 1.0:
        raise ValueError(
            f"temperature must not be negative and top_p in (0, 1], not {temperature} and {top_p}"
        )
    cache = model.new_cache(1, len(prompt) + max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.tensor([prompt])
    for _ in range(max_new_tokens):
        logits_V = model(ids_BT, cache)[0, -1].float()
        token = choose(logits_V, temperature=temperature, top_p=top_p, generator=generator)
        if token in model.config.eos_token_ids:
            return
        yield token
        ids_BT = torch.tensor([[token]])


def choose(logits_V: Tensor, *, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token from float32 logits; arguments as in `generate`."""
    if temperature == 0.0:
        return int(logits_V.argmax())
    probabilities, order = (logits_V / temperature).softmax(-1).sort(descending=True)
    # A token stays if those before it have less than top_p together, so the first one always does.
    before = probabilities.cumsum(-1) - probabilities
    return int(
        order[torch.multinomial(probabilities.masked_fill(before >= top_p, 0.0), 1, generator=generator)]
    )
