"""A quantized weight during one load: what has arrived, what waits, and what is done with each arrival.

The box of an arrival is cut into whole scale units, which are quantized straight from the source, and a rest, which is
staged until its units are whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import cast

import torch
from torch import Tensor, nn

from olq.alloc import abandon, allocate
from olq.errors import NonFiniteError, StateError
from olq.methods.base import QuantMethod, Target, WeightPlan
from olq.reload.checks import check_source, first_non_finite, same_bytes
from olq.reload.cutting import Piece, cut, normal
from olq.reload.progress import Progress, Stored, note_lost
from olq.reload.quality import ErrorMeter
from olq.reload.region import Box, Masks, intersect, whole
from olq.reload.stage import Meter, Stage


class QuantizedWeight(Progress):
    """A weight that is stored by a method.

    Args:
        label: full name of the weight.
        parameter: its load-format Parameter, on the meta device.
        method: stores it.
        plan: how.
        device: where its kernel tensors live.
        tensors: live kernel tensors by suffix, on a reload; otherwise they are made at the first arrival.
        meter: counts staged bytes over the whole load.
        measure: whether to keep the quantization error.
        pinned: make new tensors in the host's memory, page-locked if the machine has a GPU.
    """

    def __init__(
        self,
        label: str,
        parameter: nn.Parameter,
        method: QuantMethod,
        plan: WeightPlan,
        *,
        device: torch.device,
        tensors: Mapping[str, Tensor] | None,
        meter: Meter,
        measure: bool = False,
        pinned: bool = False,
    ) -> None:
        super().__init__(label, parameter)
        self.method, self.plan, self.device = method, plan, device
        self._pinned = pinned
        #: The last arrival of units that were written and not looked at yet; see `judge`.
        self.unjudged, self._later = "", False
        self._before: Mapping[str, Tensor] | None = None
        self._copy_before = False
        self._changes: tuple[int, int] | None = None
        self.error = ErrorMeter() if measure else None
        self.direct_elements = self.staged_elements = 0
        self._meter = meter
        self._stages: dict[tuple[tuple[int, ...], int], Stage] = {}
        self._live = tensors
        self._made = False
        self._broken = ""
        self._padded = False

    def arrive(self, box: Box, source: Tensor, name: str, stored: Stored | None = None) -> None:
        """Quantize or stage what arrived. When it returns, the source has been consumed.

        Args:
            box: elements of the parameter, none of which has arrived before.
            source: their values, of the box's shape; any strides; on any device.
            name: what it was called, for messages.
            stored: gets the staged units that this completes, where other arrivals belong to the same call: its
                caller then calls `note_lost` if one of them fails.

        Raises:
            SourceError: the source is not a plain float tensor.
            CoverageError: an element arrived before.
            NonFiniteError: a value is inf or NaN, and the method refuses that. The box may be fed again.
            StateError: an earlier error lost staged elements; the layer has to be loaded anew.
        """
        check_source(source, self.label, name)
        with self._lock, torch.no_grad():
            self._check_whole(name)
            self.check_new(box, name)
            self.touched = True
            self.prepare_tensors()
            self.arrivals += 1
            units: Stored = [] if stored is None else stored
            try:
                for piece in cut(self.plan, box):
                    self._take(piece, source, name, units)
                self._tell_followers([(box, source)], name, units)
            except BaseException:
                self._unstage(box)
                if stored is None:
                    note_lost(units, name)
                raise
            self.coverage.add(box, name)
            if self._before is not None:
                self.changes()

    def retract(self, box: Box) -> None:
        """See `Progress.retract`."""
        super().retract(box)
        self._unstage(box)

    def put(
        self, pieces: Sequence[Piece], source: Tensor, name: str, stored: Stored, *, later: bool = False
    ) -> None:
        """Quantize or stage an arrival that has been claimed. Grad mode is off.

        Args:
            pieces: the arrival, as `cut`.
            source: of the arrival's shape.
            name: what it is called, for messages.
            stored: see `arrive`.
            later: units may be judged afterwards, by `judge`, where looking at them would make a GPU wait.

        Raises:
            NonFiniteError: see `arrive`. The caller takes the claim back.
        """
        with self._lock:
            self._check_whole(name)
            self.prepare_tensors()
            self._later = later and self.error is None and self.method.judges_later and waits(self.device)
            try:
                for piece in pieces:
                    self._take(piece, source, name, stored)
            finally:
                self._later = False
            if self._before is not None:
                self.changes()

    def take_over(self, box: Box, product: Masks, count: int, name: str) -> None:
        """Account for units that have been written already, to be judged later. Arguments are those of `claim`."""
        self.claim(box, product, count, name)
        self.settle(count)
        self.direct_elements += count
        self.unjudged = name

    def lose(self, name: str) -> None:
        """Elements that had been staged are gone: this load can't finish."""
        self._broken = name

    def _unstage(self, box: Box) -> None:
        """Forget staged elements of an arrival that failed or was taken back."""
        for (at, part), stage in self._stages.items():
            start = self.plan.geometry.starts[part]
            rows = intersect(box[-2], range(start, start + self.plan.geometry.parts[part]))
            if rows and all(i in indices for i, indices in zip(at, box[:-2], strict=True)):
                inside = normal(range(rows.start - start, rows.stop - start, rows.step))
                stage.forget(inside, normal(box[-1]))

    def holds(self, source: Tensor) -> bool:
        """Whether the stored bytes are those that `source` would be stored as. Needs the kernel tensors once more."""
        twin = QuantizedWeight(
            self.label,
            cast("nn.Parameter", self.parameter),
            self.method,
            self.plan,
            device=self.device,
            tensors=None,
            meter=self._meter,
        )
        twin.arrive(whole(self.coverage.shape), source, self.label)
        return all(same_bytes(tensor, twin.tensors[suffix]) for suffix, tensor in self.tensors.items())

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Kernel tensors by suffix: the live ones, or new ones made when first asked for."""
        if self._live is None:
            self._made = True
            self._live = {
                suffix: allocate(
                    spec,
                    device="cpu" if self._pinned else self.device,
                    owner=self.label + suffix,
                    pinned=self._pinned and torch.cuda.is_available(),
                )
                for suffix, spec in self.plan.tensors.items()
            }
        return self._live

    @property
    def made(self) -> bool:
        """Whether this load has kernel tensors of its own, beside the live ones or before there were any."""
        return self._made

    def replace_tensor(self, suffix: str, tensor: Tensor) -> None:
        """Use other memory for a kernel tensor; it holds the bytes already."""
        self._live = {**self.tensors, suffix: tensor}

    def prepare_tensors(self) -> None:
        """Make the kernel tensors if there are none and write their padding, once a load."""
        if not self._padded:
            if self._before is not None and self._copy_before:
                self._before = {suffix: tensor.clone() for suffix, tensor in self._before.items()}
            self.method.write_padding_(self.tensors, self.plan)
            self._padded = True

    def watch(self, live: Mapping[str, Tensor], *, copy: bool) -> None:
        """Count what this load changes.

        Args:
            live: the kernel tensors as they are, by suffix.
            copy: they will be written over: keep their bytes from the first arrival to the last.
        """
        self._before, self._copy_before = live, copy

    def changes(self) -> tuple[int, int] | None:
        """Bytes of codes and scales that differ from before, padding included; None if not watched or not complete."""
        with self._lock:
            if self._before is not None and self.coverage.complete and self._padded:
                moved = {
                    s: int((old != self.tensors[s].to(old.device)).sum()) for s, old in self._before.items()
                }
                self._changes = moved.pop("", 0), sum(moved.values())
                self._before = None
            return self._changes

    def discard(self) -> None:
        """Drop what waits."""
        for stage in self._stages.values():
            stage.discard()
        self._stages.clear()

    def give_up(self) -> None:
        """Drop everything: nobody will read kernel tensors that were made for this load, and nothing more may come."""
        with self._lock:
            self._broken = "the abort of this load"
            self.discard()
        if self._made:
            abandon(*self.tensors.values())

    def _take(self, piece: Piece, source: Tensor, name: str, stored: Stored) -> None:
        """Quantize or stage one piece of an arrival."""
        if piece.index is not None:
            source = source[piece.index]
        if piece.whole_units:
            self._quantize(piece.target, source, name)
            self.direct_elements += piece.elements
        else:
            at = piece.target
            self._stage(piece.lead, at.part, at.rows, at.columns, source, name, stored)

    def _stage(
        self, lead: Box, part: int, rows: range, columns: range, source: Tensor, name: str, stored: Stored
    ) -> None:
        height, width = self.plan.geometry.parts[part], self.plan.geometry.columns
        for at, matrix in _matrices(lead, source):
            stage = self._stages.get((at, part))
            if stage is None:
                stage = self._stages[at, part] = Stage(
                    height,
                    width,
                    self.plan.unit_of(part),
                    dtype=self.staged_dtype(source.dtype),
                    device=self.device,
                    meter=self._meter,
                )
            fixed = tuple(slice(i, i + 1) for i in at)
            with closing(stage.write(rows, columns, matrix)) as units:
                for ready in units:
                    elements = ready.elements[(None,) * len(at)]
                    self._quantize(Target(fixed, part, ready.rows, ready.columns), elements, name)
                    stored.append((self, self._box(at, part, ready.rows, ready.columns)))
            self.staged_elements += matrix.numel()

    def _box(self, at: tuple[int, ...], part: int, rows: range, columns: range) -> Box:
        """A box of the parameter, from a position inside a part of a matrix."""
        start = self.plan.geometry.starts[part]
        inside = range(rows.start + start, rows.stop + start, rows.step)
        return (*(range(i, i + 1) for i in at), inside, columns)

    def staged_dtype(self, source: torch.dtype) -> torch.dtype:
        """What a copy of a source is rounded to: the parameter's dtype, or at least float32 if precision is kept."""
        keep = getattr(self.method.params, "source_precision", "parameter") == "keep"
        return torch.promote_types(source, torch.float32) if keep else self.plan.dtype

    def _quantize(self, target: Target, source: Tensor, name: str) -> None:
        if self._later:
            self.method.write_(source, self.tensors, self.plan, target)
            self.unjudged = name
        elif not self.method.quantize_(source, self.tensors, self.plan, target):
            raise self._not_finite(target, source, name)
        if self.error is not None:
            self.error.add(self.method, self.plan, self.tensors, target, source)

    def _check_whole(self, name: str) -> None:
        if self._broken:
            raise StateError(
                "An earlier error lost elements of this weight that had been staged.",
                where=self.label,
                found=f"the error at {self._broken!r}, and now {name!r}",
                need="a load from the start",
                remedy="abort this load and begin another",
            )

    def _not_finite(self, target: Target, source: Tensor, name: str) -> NonFiniteError:
        at, value = first_non_finite(
            source if source.dtype == self.plan.dtype else source.to(self.plan.dtype)
        )
        lead = [
            s.start + s.step * i if s.step else s.start + i for s, i in zip(target.lead, at, strict=False)
        ]
        row = self.plan.geometry.starts[target.part] + target.rows[at[-2]]
        element = (*lead, row, target.columns[at[-1]])
        came_as = self.coverage.find(tuple(range(i, i + 1) for i in element)) or name
        return NonFiniteError(
            "A weight holds a value that is not finite.",
            where=f"{self.label}[{', '.join(map(str, element))}], from {came_as!r}",
            found=str(value),
            need="finite values",
            remedy="repair the checkpoint, or set the method's nonfinite='saturate'",
        )


def judge(weights: Iterable[QuantizedWeight]) -> None:
    """Look at what was written to be judged later, in weights that are complete: one wait for the GPU.

    Raises:
        NonFiniteError: a weight got inf or NaN, and its method refuses that. Which element is not known any more, and
            the load has to begin again.
    """
    due = [one for one in weights if one.unjudged and one.coverage.complete and not one.waiting]
    bad: list[QuantizedWeight] = []
    for weight, good in zip(due, finite([(w.method, w.device, w.tensors) for w in due]), strict=True):
        if not good:
            weight.lose(weight.unjudged)
            bad.append(weight)
        weight.unjudged = ""
    if bad:
        raise NonFiniteError(
            "A weight holds a value that is not finite.",
            where=", ".join(one.label for one in bad[:5]),
            found=f"{len(bad)} weights with a scale that is NaN, after their sources have been consumed",
            need="finite values",
            remedy="repair the sources and load again (sources='transient' names the element), or set the method's "
            "nonfinite='saturate'",
        )


def finite(stored: Sequence[tuple[QuantMethod, torch.device, Mapping[str, Tensor]]]) -> list[bool]:
    """Whether each weight that has been written as a whole is usable. All are asked before any answer is waited for.

    Args:
        stored: method, device and kernel tensors by suffix of each.
    """
    groups: dict[tuple[QuantMethod, torch.device], list[int]] = {}
    for i, (method, device, _) in enumerate(stored):
        groups.setdefault((method, device), []).append(i)
    answers = [(group, method.finite([stored[i][2] for i in group])) for (method, _), group in groups.items()]
    good = {i: one for group, answer in answers for i, one in zip(group, answer.tolist(), strict=True)}
    return [good[i] for i in range(len(stored))]


def waits(device: torch.device) -> bool:
    """Whether looking at a result waits for everything before it."""
    return device.type != "cpu"


def _matrices(lead: Box, source: Tensor) -> "list[tuple[tuple[int, ...], Tensor]]":
    """Each matrix of a [*lead, n, k] source with its position in the leading dimensions."""
    found: list[tuple[tuple[int, ...], Tensor]] = [((), source)]
    for indices in lead:
        found = [((*at, i), tensor[j]) for at, tensor in found for j, i in enumerate(indices)]
    return found
