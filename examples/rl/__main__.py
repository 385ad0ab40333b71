"""Learn a task by policy gradients with rollouts from a quantized engine, reloaded in place at every step.

python -m examples.rl [--method fp8 nvfp4] [--steps 60] [--seed 0] [--out build/rl]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import torch

from examples.engine.told import told

from .loop import Loop, Step
from .plot import plot
from .trainer import Settings

CHECKPOINT = Path(__file__).resolve().parents[1] / "tiny_lm" / "checkpoint_a"
#: Steps averaged for the start and the end of a run.
ENDS = 5


def run(method: str, loop: Loop, steps: int) -> list[Step]:
    """Run the steps, print one line for each and a summary."""
    start = time.perf_counter()
    print(f"--- {method}\nstep  reward  KL(rollout, trainer)  |gap|  truncated  reload ms  generation  drawn")
    done: list[Step] = []
    for number in range(1, steps + 1):
        step = loop.step()
        done.append(step)
        header = step.sample.partition("\n")[0]
        print(
            f"{number:4}  {step.reward:6.3f}  {step.update.kl:20.5f}  {step.update.gap:5.3f}"
            f"  {step.update.truncated:9.2%}  {step.reload_ms:9.1f}  {step.generation:10}  {header}",
            flush=True,
        )
    moved = loop.moved()
    first, last = (fmean(step.reward for step in some) for some in (done[:ENDS], done[-ENDS:]))
    print(f"{method}: mean reward {first:.3f} in the first {ENDS} steps, {last:.3f} in the last {ENDS}")
    print(
        f"{method}: KL(rollout, trainer) {fmean(step.update.kl for step in done):.5f} nats a token on average"
    )
    reloads = [step.reload_ms for step in done]
    print(f"{method}: {median(reloads):.1f} ms a reload (median), {min(reloads):.1f} ms the fastest")
    print(f"{method}: addresses changed: {len(moved)} of {len(loop.addresses)} tensors")
    print(f"{method}: {time.perf_counter() - start:.0f} seconds for {steps} steps\n", flush=True)
    if moved:
        sys.exit(f"error: a reload moved {', '.join(moved)}")
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Run each method from the same checkpoint and seed, and plot them together."""
    parser = argparse.ArgumentParser(prog="python -m examples.rl", description=str(__doc__).splitlines()[0])
    parser.add_argument("--method", nargs="+", default=["fp8", "nvfp4"], help="of the engine; keep: bfloat16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/rl"), help="folder for the plot")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument("--group", type=int, default=16, help="continuations of each")
    parser.add_argument("--new-tokens", type=int, default=16, help="the most in a continuation")
    learn = parser.add_argument_group("the trainer")
    learn.add_argument("--rate", type=float, default=Settings.rate, help="Adam's")
    learn.add_argument("--epochs", type=int, default=Settings.epochs, help="updates from one rollout")
    learn.add_argument("--clip", type=float, default=Settings.clip, help="of the ratio new / old")
    learn.add_argument(
        "--cap", type=float, default=Settings.cap, help="of the importance weight; 0: no weight"
    )
    learn.add_argument("--beta", type=float, default=Settings.beta, help="weight of the KL to the start")
    args = parser.parse_args(arguments)

    settings = Settings(rate=args.rate, epochs=args.epochs, clip=args.clip, cap=args.cap, beta=args.beta)
    sizes = {"prompts": args.prompts, "group": args.group, "new_tokens": args.new_tokens}
    runs = {
        method: run(method, Loop(CHECKPOINT, method, settings, seed=args.seed, **sizes), args.steps)
        for method in args.method
    }
    picture = args.out / "rl.png"
    plot(runs, picture)
    print(f"reward, gap and reload time: {picture}")


if __name__ == "__main__":
    # One thread: the matrices are too small for more, and equal seeds then give equal runs.
    torch.set_num_threads(1)
    with told():
        main()
