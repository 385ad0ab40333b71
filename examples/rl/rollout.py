"""The rollout engine: a quantized model that draws continuations, and takes new weights without moving.

Letters   B = sequences, L = prompt tokens, T = generated tokens, V = vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import olq
from examples.engine import load_model


@dataclass(frozen=True)
class Rollout:
    """What was drawn.

    Args:
        ids_BS: prompt and continuation, S = L + T, int64.
        logprobs_BT: of each drawn token by the engine that drew it, float32.
        mask_BT: tokens up to the one that ended the continuation, bool; the others mean nothing.
    """

    ids_BS: Tensor
    logprobs_BT: Tensor
    mask_BT: Tensor

    @property
    def continuations(self) -> list[list[int]]:
        """The drawn tokens that count, of each sequence."""
        drawn_BT = self.ids_BS[:, -self.mask_BT.shape[1] :]
        return [ids[mask].tolist() for ids, mask in zip(drawn_BT, self.mask_BT, strict=True)]


class RolloutEngine:
    """The example engine with olq in it, live from here on.

    Args:
        folder: checkpoint to start from.
        method: of all linear layers: fp8, mxfp8, nvfp4, ...; `keep` leaves them in bfloat16.
    """

    def __init__(self, folder: Path, method: str) -> None:
        self.model, self.report = load_model(folder, olq.QuantConfig(method=method))

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> olq.Report:
        """Quantize the trainer's weights straight into the tensors that the engine computes with.

        Args:
            weights: (checkpoint name, full-precision tensor), all of the model's, in any order.
        """
        self.report = olq.reload(self.model, weights)
        return self.report

    def addresses(self) -> dict[str, int]:
        """Where each parameter and buffer lies: what a captured graph or a kernel's descriptor would hold."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor.data_ptr() for name, tensor in tensors}

    @torch.no_grad()  # not inference_mode: the trainer needs what is drawn here in its backward
    def sample(
        self, prompts_BL: Tensor, ends_V: Tensor, *, new_tokens: int, generator: torch.Generator
    ) -> Rollout:
        """Continue all prompts together, at temperature 1, from the engine's own distribution.

        Args:
            prompts_BL: token ids, all prompts of one length.
            ends_V: which tokens end a continuation.
            new_tokens: the most that are drawn for each.
            generator: of the draws.
        """
        cache = self.model.new_cache(len(prompts_BL), prompts_BL.shape[1] + new_tokens)
        ids_BT, drawn, logprobs, masks = prompts_BL, [], [], []
        alive_B1 = torch.ones(len(prompts_BL), 1, dtype=torch.bool)
        while len(drawn) < new_tokens and alive_B1.any():
            logprobs_BV = self.model(ids_BT, cache)[:, -1].float().log_softmax(-1)
            ids_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
            drawn.append(ids_BT)
            logprobs.append(logprobs_BV.gather(1, ids_BT))
            masks.append(alive_B1)
            alive_B1 = alive_B1 & ~ends_V[ids_BT]
        return Rollout(torch.cat((prompts_BL, *drawn), 1), torch.cat(logprobs, 1), torch.cat(masks, 1))
