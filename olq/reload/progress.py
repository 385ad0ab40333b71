"""One parameter during one load: what has arrived, what waits, and what is done with each arrival.

An arrival is (box of the parameter, source, name). For a quantized weight the box is cut into whole scale units, which
are quantized straight from the source, and a rest, which is staged until its units are whole. A parameter that stays
in high precision has been written already; only its coverage is kept.
"""

from collections.abc import Mapping, Sequence
from threading import RLock
from typing import cast

import torch
from torch import Tensor, nn

from olq.alloc import abandon, allocate
from olq.errors import CoverageError, NonFiniteError, SourceError, StateError
from olq.methods.base import QuantMethod, Target, WeightPlan
from olq.reload.quality import ErrorMeter
from olq.reload.region import Box, Coverage, boxes, describe, intersect, size, slices, whole
from olq.reload.stage import Meter, Stage

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Dtypes of quantized weights, which mean nothing without their scales.
CODES = (
    torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
)  # fmt: skip


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

    def retract(self, box: Box, name: str) -> None:
        """Take an arrival back, because another one of the same call failed: the call may be repeated.

        Args:
            box: arrived in this call, as `name`.
            name: what it was called.
        """
        with self._lock:
            self.coverage.remove(box)
            for follower in self.followers:
                follower.retract(box, name)

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

    def arrive_all(self, written: Sequence[Box], name: str) -> list[Box]:
        """Record the writes of one call, or none of them if a follower refuses its values.

        Returns:
            The elements that are new, as disjoint boxes.

        Raises:
            CoverageError: another thread wrote the same elements meanwhile.
        """
        with self._lock:
            for box in written:
                self.check_new(box, name)
            self.arrivals += 1
            new = [
                part for box in written for product in self.coverage.add(box, name) for part in boxes(product)
            ]
            done: list[tuple[QuantizedWeight, Box]] = []
            try:
                for follower in self.followers:
                    for part in new:
                        follower.arrive(part, self.parameter.detach()[slices(part)], name)
                        done.append((follower, part))
            except BaseException:
                for follower, part in done:
                    follower.retract(part, name)
                for part in new:
                    self.coverage.remove(part)
                raise
            return new

    def copy(self, box: Box, source: Tensor, name: str) -> None:
        """Write `source` and record it.

        Raises:
            CoverageError: an element arrived before.
        """
        self.check_source(source, name)
        with self._lock, torch.no_grad():
            self.check_new(box, name)
            self.touched = True
            self.parameter.detach()[slices(box)].copy_(source)
            self.arrive(box, name)

    def check_source(self, source: Tensor, name: str) -> None:
        """Raise `SourceError` if a float parameter would take codes of a quantized tensor for values."""
        if (
            source.dtype in CODES
            and self.parameter.dtype.is_floating_point
            and self.parameter.dtype.itemsize > 1
        ):
            raise _source_error(source, self.label, name, FLOATS)

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
        check_shape(values, self, "parameter.data = ...")
        self.check_source(values, "parameter.data = ...")
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
        self._units_left = 0  # arrivals of staged units at the method
        self._broken = ""
        self._padded = False

    def arrive(self, box: Box, source: Tensor, name: str) -> None:
        """Quantize or stage what arrived. When it returns, the source has been consumed.

        Args:
            box: elements of the parameter, none of which has arrived before.
            source: their values, of the box's shape; any strides; on any device.
            name: what it was called, for messages.

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
            left = self._units_left
            try:
                self._cut_by_part(box, source, name)
                for follower in self.followers:
                    follower.arrive(box, source, name)
            except BaseException:
                if self._units_left != left:  # other arrivals' elements of these units were in the stage only
                    self._broken = name
                raise
            self.coverage.add(box, name)

    def retract(self, box: Box, name: str) -> None:
        """Take an arrival back. What it may have completed in the stage can't be taken back."""
        super().retract(box, name)
        if self._units_left:
            self._broken = name

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

    def _cut_by_part(self, box: Box, source: Tensor, name: str) -> None:
        for part, (start, count) in enumerate(
            zip(self.plan.geometry.starts, self.plan.geometry.parts, strict=True)
        ):
            rows = intersect(box[-2], range(start, start + count))
            if rows and size(box):
                first = (rows.start - box[-2].start) // box[-2].step
                inside = _normal(range(rows.start - start, rows.stop - start, rows.step))
                some = source if len(rows) == len(box[-2]) else source[..., first : first + len(rows), :]
                self._arrive_part(box[:-2], part, inside, some, box[-1], name)

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

    def _arrive_part(
        self, lead: Box, part: int, rows: range, source: Tensor, columns: range, name: str
    ) -> None:
        columns = _normal(columns)
        unit_rows, unit_columns = self.plan.unit_of(part)
        height, width = self.plan.geometry.parts[part], self.plan.geometry.columns
        inner_rows, inner_columns = _inner(rows, unit_rows, height), _inner(columns, unit_columns, width)
        if not inner_rows or not inner_columns:
            self._stage(lead, part, rows, columns, source, name)
            return
        top, left = rows.index(inner_rows[0]), columns.index(inner_columns[0])
        bottom, right = top + len(inner_rows), left + len(inner_columns)
        target = Target(tuple(slice(r.start, r.stop, r.step) for r in lead), part, inner_rows, inner_columns)
        whole_units = len(inner_rows) == len(rows) and len(inner_columns) == len(columns)
        self._quantize(target, source if whole_units else source[..., top:bottom, left:right], name)
        self.direct_elements += size((*lead, inner_rows, inner_columns))
        if top:
            self._stage(lead, part, rows[:top], columns, source[..., :top, :], name)
        if bottom < len(rows):
            self._stage(lead, part, rows[bottom:], columns, source[..., bottom:, :], name)
        if left:
            self._stage(lead, part, inner_rows, columns[:left], source[..., top:bottom, :left], name)
        if right < len(columns):
            self._stage(lead, part, inner_rows, columns[right:], source[..., top:bottom, right:], name)

    def _stage(self, lead: Box, part: int, rows: range, columns: range, source: Tensor, name: str) -> None:
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
            for ready in stage.write(rows, columns, matrix):
                self._units_left += 1
                elements = ready.elements[(None,) * len(at)]
                try:
                    self._quantize(Target(fixed, part, ready.rows, ready.columns), elements, name)
                except Exception:
                    self._broken = name  # the elements of these units were here only
                    raise
            self.staged_elements += matrix.numel()

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
        at, value = _first_non_finite(
            source if source.dtype == self.plan.dtype else source.to(self.plan.dtype)
        )
        lead = [
            s.start + s.step * i if s.step else s.start + i for s, i in zip(target.lead, at, strict=False)
        ]
        row = self.plan.geometry.starts[target.part] + target.rows[at[-2]]
        where = ", ".join(map(str, (*lead, row, target.columns[at[-1]])))
        return NonFiniteError(
            "A weight holds a value that is not finite.",
            where=f"{self.label}[{where}], from {name!r}",
            found=str(value),
            need="finite values",
            remedy="repair the checkpoint, or set the method's nonfinite='saturate'",
        )


def check_source(source: Tensor, label: str, name: str) -> None:
    """Raise `SourceError` unless `source` is a plain float tensor with memory."""
    if source.dtype not in FLOATS or source.device.type == "meta":
        raise _source_error(source, label, name, FLOATS)


def check_shape(source: Tensor, progress: Progress, name: str) -> None:
    """Raise `SourceError` unless `source` has the parameter's shape, or both have one element."""
    parameter = progress.parameter
    if source.shape != parameter.shape and not source.numel() == parameter.numel() == 1:
        raise SourceError(
            "A tensor does not have its parameter's shape.",
            where=f"{progress.label}, from {name!r}",
            found=f"shape {list(source.shape)}, {source.dtype}",
            need=f"shape {list(parameter.shape)}",
            remedy="check that checkpoint and model agree; slice fused or sharded tensors before feeding them",
        )


def _source_error(source: Tensor, label: str, name: str, need: Sequence[torch.dtype]) -> SourceError:
    if source.device.type == "meta":
        found, remedy = "a tensor on the meta device: it has no values", "feed tensors that are in memory"
    elif source.dtype in CODES:
        found = f"{source.dtype}, which looks already quantized or packed"
        remedy = "feed the full-precision weight; quantized tensors load by their own names, scales included"
    else:
        found, remedy = f"{source.dtype}, which is no weight", "feed the full-precision weight"
    return SourceError(
        "This tensor can't be the source of a full-precision weight.",
        where=f"{label}, from {name!r}",
        found=found,
        need=f"one of {', '.join(str(d) for d in need)}, with values",
        remedy=remedy,
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality of bytes of tensors of one dtype: -0.0 is not 0.0, and NaN equals itself."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(as_integers), b.to(a.device).view(as_integers))


def contradiction(first: str, second: str) -> CoverageError:
    """What to raise when a tied parameter has different values under two names."""
    return CoverageError(
        "A tied parameter arrived under two names with different values.",
        where=f"{second} (tied to {first})",
        found="values that differ from those that arrived first",
        need="equal values, or a model whose parameters are not tied",
        remedy="untie the parameters before prepare(), or drop one of the names from the source",
    )


def _normal(indices: range) -> range:
    """The same indices with an exact stop, and step 1 where there is one index at most."""
    if len(indices) <= 1:
        return range(indices.start, indices.start + len(indices))
    return range(indices.start, indices[-1] + 1, indices.step)


def _inner(indices: range, unit: int, extent: int) -> range:
    """Indices that make up whole units."""
    if unit == 1:
        return indices
    if indices.step != 1:
        return range(0)
    first = -(-indices.start // unit) * unit
    last = indices.stop if indices.stop == extent else indices.stop // unit * unit
    return range(first, max(last, first))


def _matrices(lead: Box, source: Tensor) -> "list[tuple[tuple[int, ...], Tensor]]":
    """Each matrix of a [*lead, n, k] source with its position in the leading dimensions."""
    found: list[tuple[tuple[int, ...], Tensor]] = [((), source)]
    for indices in lead:
        found = [((*at, i), tensor[j]) for at, tensor in found for j, i in enumerate(indices)]
    return found


def _first_non_finite(source: Tensor) -> tuple[list[int], float]:
    """Index and value of the first element that is inf or NaN; looked for row by row, without a large mask."""
    for i, row in enumerate(source.reshape(-1, source.shape[-1])):
        bad = (~row.isfinite()).nonzero()
        if len(bad):
            index = torch.unravel_index(torch.tensor(i, device="cpu"), source.shape[:-1])
            return [*(int(d) for d in index), int(bad[0])], float(row[bad[0]])
    return [0] * source.dim(), float("nan")
