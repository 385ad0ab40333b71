"""Reward, log-prob gap and reload time over the steps, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .loop import Step


def plot(runs: Mapping[str, Sequence[Step]], path: Path) -> None:
    """Write three panels with one line for each method. Needs matplotlib, which is imported only here.

    Args:
        runs: steps by the rollout engine's method.
        path: PNG file; its folder is made.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    panels = {
        "mean reward": lambda step: step.reward,
        "KL(rollout, trainer)\nnats a token": lambda step: step.update.kl,
        "reload, ms": lambda step: step.reload_ms,
    }
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (label, value) in zip(axes, panels.items(), strict=True):
        for method, steps in runs.items():
            axis.plot(range(1, len(steps) + 1), [value(step) for step in steps], label=f"{method} rollouts")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1.02)
    for axis in axes[1:]:
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="lower right")
    axes[-1].set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
