"""Policy gradients with a quantized rollout engine that gets the trainer's weights in place, each step.

    python -m examples.rl --method fp8 nvfp4 --steps 60 --out build/rl          (or `make rl`)

Reading order: `loop` (one step of it), `rollout` (where olq comes in), `trainer`, `grpo` (the formulas), `task`.
"""
