"""Random programs of writes, as loaders write them: the same steps run on real memory and under the counter."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


class Values:
    """Reproducible source tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, shape: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Numbers of different sizes."""
        size = torch.randint(-8, 8, shape, generator=self._generator).double().exp2()
        return (torch.randn(shape, generator=self._generator, dtype=torch.float64) * size).to(dtype)


@dataclass(frozen=True)
class Step:
    """A write, or a few that belong together.

    Args:
        kind: a key of `KINDS`.
        at: index of slices and integers.
        dtype: of sources.
        choice: decides everything else.
    """

    kind: str
    at: tuple[Any, ...]
    dtype: torch.dtype
    choice: int

    def run(self, p: Tensor, values: Values) -> None:
        """Do it to a parameter, or to a band of one."""
        KINDS[self.kind](p, values, self)


@dataclass(frozen=True)
class Call:
    """One loader call: steps on a band of the first dimension, values from a seed."""

    band: range
    steps: tuple[Step, ...]
    seed: int

    def run(self, parameter: Tensor, rest: Tensor | None = None) -> Tensor:
        """Run the steps; then write those elements that no step has written.

        Args:
            parameter: NaN where it has not been written, or under the counter.
            rest: mask of the band's elements that the steps leave; None if the parameter's NaN tell.

        Returns:
            That mask.
        """
        values = Values(self.seed)
        view = parameter[self.band.start : self.band.stop]
        for step in self.steps:
            step.run(view, values)
        rest = torch.isnan(view) if rest is None else rest
        view[rest] = values.of((int(rest.sum()),), view.dtype)
        return rest


def copy(p: Tensor, values: Values, step: Step) -> None:
    view = (p, p.data)[step.choice % 2][step.at]
    view.copy_(values.of(view.shape, step.dtype))


def set_item(p: Tensor, values: Values, step: Step) -> None:
    p[step.at] = (values.of(p[step.at].shape, step.dtype), 0.0, -0.0, -3.7)[step.choice % 4]


def fill(p: Tensor, values: Values, step: Step) -> None:
    if step.choice % 2:
        p[step.at].fill_(0.3)
    else:
        p[step.at].zero_()


def broadcast(p: Tensor, values: Values, step: Step) -> None:
    view = p[step.at]
    view.copy_(values.of(view.shape[len(view.shape) - step.choice % 2 :], step.dtype))


def transposed(p: Tensor, values: Values, step: Step) -> None:
    view = p.transpose(-1, -2)[..., : step.choice % p.shape[-1] + 1, step.choice % 2 :]
    view.copy_(values.of(view.shape, step.dtype))


def transposed_source(p: Tensor, values: Values, step: Step) -> None:
    p.copy_(values.of((*p.shape[:-2], p.shape[-1], p.shape[-2]), step.dtype).transpose(-1, -2))


def heads(p: Tensor, values: Values, step: Step) -> None:
    rows = p.shape[-2] // 4 * 4
    if rows:
        view = p[..., :rows, :].unflatten(-2, (2, 2, -1)).select(-3, step.choice % 2)
        view.copy_(values.of(view.shape, step.dtype))


def flat(p: Tensor, values: Values, step: Step) -> None:
    view = p.as_strided((p.numel(),), (1,))[step.choice % p.numel() :: step.choice % 3 * 2 + 1]
    view.copy_(values.of(view.shape, step.dtype))


def diagonal(p: Tensor, values: Values, step: Step) -> None:
    view = p.diagonal(step.choice % p.shape[-1], -2, -1)
    view.copy_(values.of(view.shape, step.dtype))


def parallelogram(p: Tensor, values: Values, step: Step) -> None:
    """A view whose rows start elsewhere each time."""
    rows, columns = p.shape[-2:]
    view = p.as_strided((*p.shape[:-2], rows - 1, columns - 1), (*p.stride()[:-2], columns + 1, 1))
    view.copy_(values.of(view.shape, step.dtype))


def foreach(p: Tensor, values: Values, step: Step) -> None:
    views = [p[..., :2, :], p[step.at]]
    torch._foreach_copy_(views, [values.of(v.shape, step.dtype) for v in views])


def rows(p: Tensor, values: Values, step: Step) -> None:
    some = sorted({step.choice % len(p), step.choice // 7 % len(p)})
    p[torch.tensor(some)] = values.of((len(some), *p.shape[1:]), p.dtype)


def columns(p: Tensor, values: Values, step: Step) -> None:
    width = p.shape[-1]
    some = torch.tensor(sorted({step.choice % width, step.choice // 7 % width, step.choice // 31 % width}))
    source = values.of((*p.shape[:-1], len(some)), p.dtype)
    if step.choice % 2:
        p[..., some] = source
    else:
        p.index_copy_(-1, some, source)


def mask(p: Tensor, values: Values, step: Step) -> None:
    some = values.of(p.shape) > 0
    p[some] = 0.5 if step.choice % 2 else values.of((int(some.sum()),), p.dtype)


def transformed(p: Tensor, values: Values, step: Step) -> None:
    view = p[step.at]
    view.copy_(values.of(view.shape, step.dtype))
    if step.choice % 3 == 0:
        view.mul_(2)
    elif step.choice % 3 == 1:
        view.copy_(-torch.exp(view.float().clamp(max=3)))
    else:
        view.clamp_(max=1).add_(0.25)


def read(p: Tensor, values: Values, step: Step) -> None:
    p[..., :1, :].copy_(values.of(p[..., :1, :].shape, step.dtype))
    p[..., -1:, :].copy_(p[..., :1, :])
    p[..., -1:, :].copy_(p[..., :1, :].flip(-1) + p[..., -1:, :])


def reused_source(p: Tensor, values: Values, step: Step) -> None:
    source = values.of(p[step.at].shape, step.dtype)
    p[step.at].copy_(source)
    other = values.of(p[step.at].shape, step.dtype)
    if step.choice % 4 == 0:
        source.zero_()
    elif step.choice % 4 == 1:
        source.copy_(other)
    elif step.choice % 4 == 2:
        torch._foreach_mul_([source], 3)
    else:
        torch.neg(other, out=source)


def temporary(p: Tensor, values: Values, step: Step) -> None:
    source = values.of(p[step.at].shape, step.dtype).to(p.device)
    if step.choice % 5 == 1:
        source = torch.zeros(source.shape, device=p.device, dtype=step.dtype).add_(source)
    elif step.choice % 5 == 2:
        source = torch.empty_like(p[step.at]).copy_(source)
    elif step.choice % 5 == 3:
        source = p.new_zeros(source.shape) + source
    elif step.choice % 5 == 4:
        source = source.to(p)
    p[step.at].copy_(source)


def out(p: Tensor, values: Values, step: Step) -> None:
    shape = p[step.at].shape
    torch.add(values.of(shape), values.of(shape), out=p[step.at])


def needs_grad(p: Tensor, values: Values, step: Step) -> None:
    with torch.no_grad():
        p[step.at].copy_(values.of(p[step.at].shape, step.dtype).requires_grad_())


KINDS: dict[str, Callable[[Tensor, Values, Step], None]] = {
    f.__name__: f
    for f in (
        copy, set_item, fill, broadcast, transposed, transposed_source, heads, flat, diagonal, parallelogram, foreach,
        rows, columns, mask, transformed, read, reused_source, temporary, out, needs_grad,
    )
}  # fmt: skip


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of slices, some with steps, some of one element, some dropping their dimension."""
    index: list[Any] = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        step = draw(st.sampled_from([1, 1, 2, 3]))
        some = slice(start, draw(st.integers(start + 1, n)), step)
        index.append(draw(st.sampled_from([slice(None), some, some, slice(start, start + 1), start])))
    return tuple(index)


@st.composite
def programs(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Call]:
    """Loader calls that write every element of a parameter, each within a band of its own, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, shape[0] - 1), max_size=2))) if shape[0] > 1 else []
    bands = [range(a, b) for a, b in pairwise([0, *cuts, shape[0]])]
    return [
        Call(
            band,
            tuple(draw(st.lists(steps((len(band), *shape[1:])), max_size=4))),
            draw(st.integers(0, 2**32)),
        )
        for band in draw(st.permutations(bands))
    ]


def steps(shape: tuple[int, ...]) -> st.SearchStrategy[Step]:
    """Any step on a tensor of this shape."""
    return st.builds(
        Step,
        kind=st.sampled_from(sorted(KINDS)),
        at=regions(shape),
        dtype=st.sampled_from(DTYPES),
        choice=st.integers(0, 10**4),
    )
