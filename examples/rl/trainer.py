"""The trainer: tiny_lm in plain PyTorch, float32, autograd and Adam. It knows nothing of olq.

Letters   B = sequences, S = tokens of a sequence, T = the generated ones at its end, V = vocabulary.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.engine import read_checkpoint
from examples.tiny_lm.model import TinyConfig, TinyLlama

from .grpo import importance, kl, policy_loss, token_mean
from .rollout import Rollout


@dataclass(frozen=True)
class Settings:
    """How the trainer learns.

    Args:
        rate: Adam's.
        epochs: updates from one rollout; with one, the ratio new / old is 1 and nothing is clipped.
        clip: how far from 1 that ratio counts.
        cap: of the truncated importance weight old / rollout. 0 switches the correction off.
        beta: weight of KL(new, ref); 0 needs no reference model.
        largest_gradient: norm that the gradient is cut to.
    """

    rate: float = 5e-5
    epochs: int = 1
    clip: float = 0.2
    cap: float = 2.0
    beta: float = 0.0
    largest_gradient: float = 1.0


@dataclass(frozen=True)
class Update:
    """What one update saw, before it changed anything: means over the tokens that were drawn.

    Args:
        kl: estimate of KL(rollout, old): how far the quantized engine is from the trainer whose weights it has.
        gap: |log old - log rollout|, nats.
        truncated: share of tokens whose importance weight met the cap.
    """

    kl: float
    gap: float
    truncated: float


class Trainer:
    """Holds the weights that are learned.

    Args:
        folder: checkpoint to start from.
        settings: how it learns.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.model = TinyLlama(TinyConfig())
        tensors = dict(read_checkpoint(folder))
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
        self.model.load_state_dict(tensors)
        self.reference = copy.deepcopy(self.model) if settings.beta else None
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.rate, betas=(0.9, 0.95))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, bfloat16 copy), one at a time: what a trainer sends to its engines."""
        for name, parameter in self.model.named_parameters():  # tied ones once
            yield name, parameter.detach().to(torch.bfloat16)

    def update(self, rollout: Rollout, advantage_B: Tensor) -> Update:
        """Learn from one rollout.

        Args:
            rollout: drawn by an engine with the weights that this trainer has now.
            advantage_B: of each sequence.
        """
        how, mask_BT = self.settings, rollout.mask_BT
        with torch.no_grad():
            old_BT = logprobs(self.model, rollout)
            weight_BT = (
                importance(old_BT, rollout.logprobs_BT, how.cap) if how.cap else torch.ones_like(old_BT)
            )
            seen = Update(
                kl=token_mean(kl(rollout.logprobs_BT, old_BT), mask_BT).item(),
                gap=token_mean((old_BT - rollout.logprobs_BT).abs(), mask_BT).item(),
                truncated=token_mean((weight_BT == how.cap).float(), mask_BT).item(),
            )
            reference_BT = logprobs(self.reference, rollout) if self.reference is not None else None
        for _ in range(how.epochs):
            new_BT = logprobs(self.model, rollout)
            loss_BT = policy_loss(new_BT, old_BT, weight_BT, advantage_B, how.clip)
            if reference_BT is not None:
                loss_BT = loss_BT + how.beta * kl(new_BT, reference_BT)
            self.optimizer.zero_grad()
            token_mean(loss_BT, mask_BT).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), how.largest_gradient)
            self.optimizer.step()
        return seen


def logprobs(model: TinyLlama, rollout: Rollout) -> Tensor:
    """Log-probabilities that a model gives to the drawn tokens, [B, T], float32."""
    T = rollout.mask_BT.shape[1]
    hidden_BTC = model.model(rollout.ids_BS[:, :-1])[:, -T:]
    logprobs_BTV = model.lm_head(hidden_BTC).float().log_softmax(-1)
    return logprobs_BTV.gather(-1, rollout.ids_BS[:, -T:, None]).squeeze(-1)
