"""Hypothesis strategies: weights of awkward values, and the ways in which a loader may cut them.

A *box* is one range for each dimension of a weight, the region that one copy writes.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor

from olq.reload.region import Box


@st.composite
def bf16_weights(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Finite bfloat16 of very different sizes, some of them zeros; drawn from a seed, so that shrinking is fast."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = torch.randint(-20, 8, (*shape[:-1], 1), generator=generator).float().exp2()
    weight = torch.randn(shape, generator=generator) * scale
    weight[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.6]))] = 0.0
    return weight.bfloat16()


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], most: int = 10) -> list[Box]:
    """A partition of a tensor into at most `most` boxes, some of them strided, in any order."""
    done: list[Box] = [tuple(range(n) for n in shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        box = done.pop(draw(st.integers(0, len(done) - 1)))
        done.extend(draw(_halves(box)))
    return draw(st.permutations(done))


@st.composite
def _halves(draw: st.DrawFn, box: Box) -> list[Box]:
    wide = [d for d, r in enumerate(box) if len(r) > 1]
    if not wide:
        return [box]
    d = draw(st.sampled_from(wide))
    r = box[d]
    if draw(st.integers(0, 3)) == 0:
        halves = [r[::2], r[1::2]]
    else:
        at = draw(st.integers(1, len(r) - 1))
        halves = [r[:at], r[at:]]
    return [(*box[:d], half, *box[d + 1 :]) for half in halves]
