"""The formulas of GRPO with a rollout policy that is not quite the trainer's.

Letters   P = prompts, G = samples of one prompt, B = P * G sequences, T = generated tokens.
Policies  rollout  the quantized engine that drew the tokens
          old      the trainer with the very weights that the engine was given
          new      the trainer being updated (equal to old in the first epoch)
          ref      the trainer before the first step
Loss      -mean over tokens of  w * min(r A, clip(r, 1 - c, 1 + c) A)  +  beta * KL(new, ref)
          r = new / old;  w = min(old / rollout, cap), the truncated importance weight

Tokens come from `rollout`, so an average over them is an average over the wrong policy: quantization moved it. The
weight w puts that right, and the cap bounds its variance. It carries no gradient.
"""

import torch
from torch import Tensor


def advantages(rewards_PG: Tensor) -> Tensor:
    """Rewards against their group: mean 0, standard deviation 1; all 0 in a group whose rewards are equal."""
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return centred_PG / (rewards_PG.std(1, correction=0, keepdim=True) + 1e-4)


def importance(old_BT: Tensor, rollout_BT: Tensor, cap: float) -> Tensor:
    """Truncated importance weights, min(old / rollout, cap), from log-probabilities."""
    return (old_BT - rollout_BT).exp().clamp(max=cap)


def policy_loss(
    new_BT: Tensor, old_BT: Tensor, weight_BT: Tensor, advantage_B: Tensor, clip: float
) -> Tensor:
    """The clipped objective of each token, weighted, as a loss, [B, T]; log-probabilities go in.

    Args:
        new_BT: of the tokens that were drawn; the gradient flows through it.
        old_BT: the same before the update.
        weight_BT: truncated importance weights.
        advantage_B: one for each sequence.
        clip: how far the ratio new / old counts.
    """
    ratio_BT, advantage_B1 = (new_BT - old_BT).exp(), advantage_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - clip, 1 + clip)
    return -weight_BT * torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)


def kl(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """KL(sampled, other) of each token from its two log-probabilities: r - 1 - log r, r = other / sampled.

    Never negative, and right on average when the tokens were drawn from `sampled`.
    """
    log_r_BT = other_BT - sampled_BT
    return log_r_BT.exp() - 1 - log_r_BT


def token_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the tokens that count."""
    return (values_BT * mask_BT).sum() / mask_BT.sum()
