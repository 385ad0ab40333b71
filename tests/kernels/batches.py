"""Weights for tests of batches: a method, its poisoned kernel tensors, and sources of any strides and alignment."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from hypothesis import strategies as st
from kernels.compare import FLOATS, bit_patterns, weight
from torch import Tensor

import olq
from numerics.cases import first_difference, poison
from olq.kernels.batch import Batch, Calls, Job, job_of
from olq.methods.base import Geometry, QuantMethod, Target, WeightPlan

METHODS = (
    olq.get_method("fp8"),
    olq.get_method("fp8", granularity="tensor"),
    olq.get_method("fp8", granularity="block", scale="power_of_two"),
    olq.get_method("mxfp8", nonfinite="saturate"),
    olq.get_method("mxfp8", rule="FLOOR", scale_layout="swizzled_128x4"),
    olq.get_method("nvfp4"),
    olq.get_method("nvfp4", scale_layout="swizzled_128x4", nonfinite="saturate", source_precision="keep"),
)


@dataclass(frozen=True)
class Spec:
    """Weights that are alike.

    Args:
        method: how they are stored.
        lead, parts, columns: their geometry.
        dtype: of sources; parameters are bfloat16.
        place: where a source lies in memory: "dense", "odd" (one element off), "region" or "transposed".
        finite: whether sources are free of inf and NaN.
        count: how many weights.
        singly: each matrix of `lead` is a source of its own.
    """

    method: QuantMethod
    lead: tuple[int, ...] = ()
    parts: tuple[int, ...] = (3,)
    columns: int = 40
    dtype: torch.dtype = torch.bfloat16
    place: str = "dense"
    finite: bool = True
    count: int = 2
    singly: bool = False

    @property
    def plan(self) -> WeightPlan:
        return self.method.plan(Geometry(self.lead, self.parts, self.columns), torch.bfloat16)

    def targets(self) -> Iterator[Target]:
        """What has a source of its own."""
        for part in range(len(self.parts)):
            whole = self.plan.whole(part)
            if not self.singly:
                yield whole
                continue
            for matrix in product(*map(range, self.lead)):
                yield replace(whole, lead=tuple(slice(i, i + 1) for i in matrix))

    def values(self, target: Target, seed: int) -> Tensor:
        """What a target is quantized from, [*lead, rows, columns]."""
        lead, part = (at.stop - at.start for at in target.lead), target.part
        shape = *lead, max(self.parts[part], 3), max(self.columns, 4)
        make = weight if self.finite else bit_patterns
        more = {} if self.finite else {"finite": False}
        whole = make(*shape, dtype=self.dtype, seed=seed, **more)
        return whole[..., : self.parts[part], : self.columns]

    def source(self, target: Target, seed: int, device: str) -> Tensor:
        """The same, where `place` says."""
        values = self.values(target, seed)
        *lead, rows, columns = values.shape
        if self.place == "transposed":
            memory = torch.empty(*lead, columns, rows, dtype=self.dtype, device=device)
            view = memory.transpose(-1, -2)
        elif self.place == "region":
            memory = torch.empty(*lead, rows + 2, columns + 9, dtype=self.dtype, device=device)
            view = memory[..., 1 : rows + 1, 3 : columns + 3]
        else:
            off = 1 if self.place == "odd" else 0
            memory = torch.empty(values.numel() + off, dtype=self.dtype, device=device)
            view = memory[off:].view(values.shape)
        return view.copy_(values)


SPECS = st.builds(
    Spec,
    method=st.sampled_from(METHODS),
    lead=st.sampled_from([(), (), (2,), (1, 2)]),
    parts=st.sampled_from([(3,), (16,), (5, 2), (1, 1, 4)]),
    columns=st.sampled_from([16, 33, 64, 100]),
    dtype=st.sampled_from(FLOATS),
    place=st.sampled_from(["dense", "odd", "region", "transposed"]),
    finite=st.booleans(),
    count=st.integers(1, 3),
    singly=st.booleans(),
)


class Weights:
    """Some weights with their memory on a device.

    Args:
        specs: what they are like.
        device: where.
        seed: of the first source's values.
    """

    def __init__(self, specs: list[Spec], device: str, seed: int = 0) -> None:
        self.device, self.specs = device, specs
        self.kernel: list[dict[str, Tensor]] = []
        self._places: list[tuple[Spec, dict[str, Tensor], Target]] = []
        for spec in specs:
            plan = spec.plan
            for _ in range(spec.count):
                tensors = {
                    suffix: poison(*made.shape, dtype=made.dtype).to(device)
                    for suffix, made in plan.tensors.items()
                }
                spec.method.write_padding_(tensors, plan)
                self.kernel.append(tensors)
                self._places += ((spec, tensors, target) for target in spec.targets())
        self.sources: list[Tensor] = []
        self.feed(seed)

    def feed(self, seed: int) -> None:
        """New sources."""
        self.sources = [
            spec.source(target, seed + i, self.device) for i, (spec, _, target) in enumerate(self._places)
        ]

    def calls(self) -> list[Calls]:
        """What each part takes."""
        found = []
        for source, (spec, tensors, target) in zip(self.sources, self._places, strict=True):
            calls = spec.method.calls(source, tensors, spec.plan, target)
            assert calls is not None
            found.append(calls)
        return found

    def jobs(self) -> list[Job]:
        """The same, prepared."""
        found = [job_of(calls) for calls in self.calls()]
        assert None not in found
        return [job for job in found if job is not None]

    def write_(self) -> None:
        """By the reference, if on a CPU."""
        for source, (spec, tensors, target) in zip(self.sources, self._places, strict=True):
            spec.method.write_(source, tensors, spec.plan, target)


def launch(batch: Batch) -> None:
    """Launch; NumPy's warnings about nonfinite values are the interpreter's."""
    with np.errstate(all="ignore"):
        batch.launch()


def write_together(weights: Weights, jobs: list[Job], batch: Batch | None = None) -> None:
    """All jobs in one batch."""
    batch = Batch() if batch is None else batch
    for job, source in zip(jobs, weights.sources, strict=True):
        assert batch.add(job, source)
    assert len(batch) == len(jobs)
    launch(batch)
    assert len(batch) == 0


def assert_alike(got: Weights, want: Weights) -> None:
    """Every byte of every kernel tensor."""
    for i, (these, those) in enumerate(zip(got.kernel, want.kernel, strict=True)):
        for suffix, tensor in those.items():
            found = first_difference(these[suffix].cpu(), tensor)
            assert found is None, f"weight {i}{suffix}: {found}"


def assert_written(specs: list[Spec], device: str, seeds: tuple[int, ...] = (0,)) -> None:
    """A batch writes the reference's bytes; jobs are made once, for the first of `seeds`."""
    got, want = Weights(specs, device, seeds[0]), Weights(specs, "cpu", seeds[0])
    jobs = got.jobs()
    for seed in seeds:
        got.feed(seed)
        want.feed(seed)
        write_together(got, jobs)
        want.write_()
        assert_alike(got, want)
