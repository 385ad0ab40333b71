"""One parameter during one load: what has arrived, what waits, and what is done with each arrival.

An arrival is (box of the parameter, source, name). For a quantized weight the box is cut into whole scale units, which
are quantized straight from the source, and a rest, which is staged until its units are whole. A parameter that stays
in high precision has been written already; only its coverage is kept.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from threading import RLock
from typing import cast

import torch
from torch import Tensor, nn

from olq.alloc import abandon, allocate
from olq.errors import CoverageError, NonFiniteError, StateError
from olq.methods.base import QuantMethod, Target, WeightPlan
from olq.reload.checks import check_shape, check_source, check_values, first_non_finite, same_bytes
from olq.reload.cutting import Piece, cut, normal
from olq.reload.quality import ErrorMeter
from olq.reload.region import Box, Coverage, boxes, describe, intersect, slices, whole
from olq.reload.stage import Meter, Stage

#: Staged units that were stored, with their boxes.
Stored = list[tuple["QuantizedWeight", Box]]


class Progress:
    """What has arrived of one parameter.

    Args:
        label: the parameter's full name.
        parameter: the load-format Parameter.
    """

    def __init__(self, label: str, parameter: Tensor) -> None:
        self.label, self.parameter = label, parameter
        self.coverage = Coverage(parameter.shape)
        self.arrivals = 0
        #: Whether its memory, or its kernel tensors, may have been written in this load.
        self.touched = False
        #: Quantized weights that take every write to this parameter too (a quantized head tied to an embedding).
        self.followers: list[QuantizedWeight] = []
        self._lock = RLock()

    def check_new(self, box: Box, name: str) -> None:
        """Raise if an element of `box` has arrived before.

        Raises:
            CoverageError: it names both arrivals.
        """
        before = self.coverage.find(box)
        if before is not None:
            raise CoverageError(
                "The same elements arrived twice.",
                where=f"{self.label}{describe(box)}",
                found=f"{before!r}, and then {name!r}",
                need="each element once a load",
                remedy="remove the duplicate from the source, or start another load to replace the weights",
            )

    def retract(self, box: Box) -> None:
        """Take an arrival back, because another one of the same call failed: the call may be repeated."""
        with self._lock:
            self.coverage.remove(box)
            for follower in self.followers:
                follower.retract(box)

    def _tell_followers(self, parts: Sequence[tuple[Box, Tensor]], name: str, stored: Stored) -> None:
        """All followers take all parts, or none of them any."""
        done: list[tuple[QuantizedWeight, Box]] = []
        try:
            for follower in self.followers:
                for box, source in parts:
                    follower.arrive(box, source, name, stored)
                    done.append((follower, box))
        except BaseException:
            for follower, box in done:
                follower.retract(box)
            raise

    def holds(self, source: Tensor) -> bool:
        """Whether the parameter is what `source` would make it."""
        raise NotImplementedError

    def missing(self) -> str | None:
        """What has not arrived, in words, or None."""
        if self.coverage.complete:
            return None
        if not self.coverage.count:
            return f"{self.label} (nothing arrived)"
        gaps = ", ".join(map(describe, self.coverage.missing()))
        return (
            f"{self.label} ({self.coverage.count} of {self.coverage.total} elements arrived; missing {gaps})"
        )


class PlainParameter(Progress):
    """A parameter in high precision. Its memory is real and has been written when `arrive` is called."""

    def arrive(self, box: Box, name: str) -> None:
        """Record a write that has happened, and pass it on to the followers.

        Args:
            box: elements that were written. Those written earlier in the same call are not counted again.
            name: under which name.
        """
        self.arrive_all([box], name)

    def arrive_all(self, written: Sequence[Box], name: str, stored: Stored | None = None) -> list[Box]:
        """Record the writes of one call, or none of them if a follower refuses its values.

        Args:
            written: boxes that may overlap.
            name: under which name.
            stored: as for `QuantizedWeight.arrive`.

        Returns:
            The elements that are new, as disjoint boxes.

        Raises:
            CoverageError: another thread wrote the same elements meanwhile.
        """
        with self._lock:
            for box in written:
                self.check_new(box, name)
            self.arrivals += 1
            new = [part for box in written for some in self.coverage.add(box, name) for part in boxes(some)]
            if not self.followers:
                return new
            if len(new) > 1:  # neighbours become one
                merged = Coverage(self.coverage.shape)
                for part in new:
                    merged.add(part)
                new = merged.boxes()
            units: Stored = [] if stored is None else stored
            try:
                self._tell_followers(
                    [(part, self.parameter.detach()[slices(part)]) for part in new], name, units
                )
            except BaseException:
                for part in new:
                    self.coverage.remove(part)
                if stored is None:
                    note_lost(units, name)
                raise
            return new

    def copy(self, box: Box, source: Tensor, name: str) -> None:
        """Write `source` and record it.

        Raises:
            CoverageError: an element arrived before.
        """
        check_values(source, self.parameter, self.label, name)
        with self._lock, torch.no_grad():
            self.check_new(box, name)
            self.touched = True
            self.parameter.detach()[slices(box)].copy_(source)
            self.arrive(box, name)

    def holds(self, source: Tensor) -> bool:
        """Whether the parameter has the values of `source`, rounded to its dtype."""
        mine = self.parameter.detach()
        return mine.shape == source.shape and same_bytes(mine, source.to(mine.device, mine.dtype))

    def put_back(self, memory: Tensor) -> Tensor:
        """Give the parameter its own memory again after a `parameter.data = x`. Nothing is copied.

        Args:
            memory: an alias of what it had, at the address that is known.

        Returns:
            The values that it had been given.
        """
        values = self.parameter.data
        self.parameter.data = memory
        return values

    def overwrite(self, values: Tensor) -> None:
        """Copy values that came by `parameter.data = x`, without recording them.

        Raises:
            SourceError: another shape, or codes of a quantized tensor.
        """
        check_shape(values, self.parameter, self.label, "parameter.data = ...")
        check_values(values, self.parameter, self.label, "parameter.data = ...")
        self.touched = True
        with torch.no_grad():
            self.parameter.detach().copy_(values)


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
    ) -> None:
        super().__init__(label, parameter)
        self.method, self.plan, self.device = method, plan, device
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

    def retract(self, box: Box) -> None:
        """See `Progress.retract`."""
        super().retract(box)
        self._unstage(box)

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
                suffix: allocate(spec, device=self.device, owner=self.label + suffix)
                for suffix, spec in self.plan.tensors.items()
            }
        return self._live

    def replace_tensor(self, suffix: str, tensor: Tensor) -> None:
        """Use other memory for a kernel tensor; it holds the bytes already."""
        self._live = {**self.tensors, suffix: tensor}

    def prepare_tensors(self) -> None:
        """Make the kernel tensors if there are none and write their padding, once a load."""
        if not self._padded:
            self.method.write_padding_(self.tensors, self.plan)
            self._padded = True

    def discard(self) -> None:
        """Drop what waits."""
        for stage in self._stages.values():
            stage.discard()
        self._stages.clear()

    def give_up(self) -> None:
        """Drop everything; nobody will read kernel tensors that were made for this load."""
        self.discard()
        if self._made:
            abandon(*self.tensors.values())

    def _take(self, piece: Piece, source: Tensor, name: str, stored: Stored) -> None:
        """Quantize or stage one piece of an arrival."""
        if piece.index is not None:
            source = source[..., piece.index[0], piece.index[1]]
        if piece.whole_units:
            self._quantize(piece.target, source, name)
            self.direct_elements += piece.elements
        else:
            self._stage(piece.lead, piece.part, piece.rows, piece.columns, source, name, stored)

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
        if not self.method.quantize_(source, self.tensors, self.plan, target):
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


def note_lost(stored: Stored, name: str) -> None:
    """After a call that failed and was taken back: weights that had stored units with elements of other calls.

    Those elements were in the stage only, and left it with the unit.
    """
    for weight, unit in stored:
        if weight.coverage.find(unit) is not None:
            weight.lose(name)


def _matrices(lead: Box, source: Tensor) -> "list[tuple[tuple[int, ...], Tensor]]":
    """Each matrix of a [*lead, n, k] source with its position in the leading dimensions."""
    found: list[tuple[tuple[int, ...], Tensor]] = [((), source)]
    for indices in lead:
        found = [((*at, i), tensor[j]) for at, tensor in found for j, i in enumerate(indices)]
    return found
