"""One step: draw with the quantized engine, reward, learn, and put the new weights into the running engine.

prompts -> engine.sample -> reward -> advantages -> trainer.update -> engine.reload
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from examples.engine import load_tokenizer

from . import task
from .grpo import advantages
from .rollout import RolloutEngine
from .trainer import Settings, Trainer, Update


@dataclass(frozen=True)
class Step:
    """What one step measured.

    Args:
        reward: mean over all sequences.
        update: the gap between the engine that drew them and the trainer whose weights it had.
        reload_ms: from the first tensor to the commit.
        generation: of the engine after the reload; it drew with the one before.
        sample: one continuation, with its prompt.
    """

    reward: float
    update: Update
    reload_ms: float
    generation: int
    sample: str


class Loop:
    """A trainer and its rollout engine in one process. Equal seeds and thread counts give equal steps.

    Args:
        folder: checkpoint that both start from.
        method: how the engine stores its linear layers.
        settings: how the trainer learns.
        prompts: drawn for each step, without repetition.
        group: continuations of each prompt; rewards are compared within.
        new_tokens: the most in a continuation.
        seed: of prompts and tokens.
    """

    def __init__(
        self,
        folder: Path,
        method: str,
        settings: Settings,
        *,
        prompts: int = 8,
        group: int = 16,
        new_tokens: int = 16,
        seed: int = 0,
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.engine = RolloutEngine(folder, method)
        self.trainer = Trainer(folder, settings)
        self.addresses = self.engine.addresses()
        self.count, self.group, self.new_tokens = prompts, group, new_tokens
        self.prompts_NL = task.prompts(self.tokenizer)
        self.ends_V = task.ends(self.tokenizer, self.engine.model.config.eos_token_ids)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self) -> Step:
        """Run one."""
        chosen = torch.randperm(len(self.prompts_NL), generator=self.generator)[: self.count]
        prompts_BL = self.prompts_NL[chosen].repeat_interleave(self.group, 0)
        rollout = self.engine.sample(
            prompts_BL, self.ends_V, new_tokens=self.new_tokens, generator=self.generator
        )
        texts = [
            self.tokenizer.decode(prompt + drawn)
            for prompt, drawn in zip(prompts_BL.tolist(), rollout.continuations, strict=True)
        ]
        rewards_PG = torch.tensor([task.reward(text) for text in texts]).view(-1, self.group)
        update = self.trainer.update(rollout, advantages(rewards_PG).flatten())
        report = self.engine.reload(self.trainer.weights())
        return Step(rewards_PG.mean().item(), update, 1e3 * report.seconds, report.generation, texts[0])

    def moved(self) -> list[str]:
        """Tensors of the engine whose address is no longer that of the first load; there should be none."""
        now = self.engine.addresses()
        return [name for name, address in self.addresses.items() if now.get(name) != address]
