"""What a load did, as data first and as a table on request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightReport:
    """One quantized weight.

    Args:
        name: full name of the load-format parameter.
        method: how it is stored, with its parameters in words.
        reason: what decided that.
        shape: logical shape.
        kernel_bytes: bytes of its kernel tensors, padding included.
        source_bytes: bytes of the full-precision weight that it replaces.
        arrivals: copies that brought it.
        direct: elements quantized straight from a source; the others were staged first.
        generation: number of commits so far.
        sqnr_db: signal to quantization noise in decibels, if measured.
        worst_db: the same of the worst block, and `worst_block`, the position of its first element.
        changed_code_bytes: bytes of codes that this load changed, and `changed_scales`, scales, if measured.
    """

    name: str
    method: str
    reason: str
    shape: tuple[int, ...]
    kernel_bytes: int
    source_bytes: int
    arrivals: int
    direct: int
    generation: int
    sqnr_db: float | None = None
    worst_db: float | None = None
    worst_block: tuple[int, ...] | None = None
    changed_code_bytes: int | None = None
    changed_scales: int | None = None

    @property
    def bits_per_element(self) -> float:
        """Bits of kernel tensors for each logical element."""
        return 8 * self.kernel_bytes / max(math.prod(self.shape), 1)


@dataclass(frozen=True, slots=True)
class KeptReport:
    """One parameter in high precision, with the reason."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Everything that a load did or left alone.

    Args:
        weights: quantized weights.
        kept: parameters in high precision, each with its reason.
        aliases: names that arrived for a parameter that has another name (tied weights).
        surplus: names that arrived and were taken by nobody, each with the reason why that was allowed.
        untouched: parameters and buffers that nothing arrived for and that may do without.
        staged_peak_bytes: the most full-precision bytes that waited at one time.
        seconds: time from begin to commit.
        generation: number of commits of the model so far.
        stale: parameters that a partial load left as they were, because its scope does not cover them.
        derived: derived tensors and hooks that were refreshed, in the order in which they ran.
        undeclared: tensors that hang on modules and that no load writes, each with what to do about it.
        replayed: tensors whose loaders did not have to run, because an earlier load had recorded what they do.
    """

    weights: Sequence[WeightReport] = ()
    kept: Sequence[KeptReport] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    surplus: Mapping[str, str] = field(default_factory=dict)
    untouched: Sequence[str] = ()
    staged_peak_bytes: int = 0
    seconds: float = 0.0
    generation: int = 1
    stale: Sequence[str] = ()
    derived: Sequence[str] = ()
    undeclared: Mapping[str, str] = field(default_factory=dict)
    replayed: int = 0

    @property
    def kernel_bytes(self) -> int:
        """Bytes of all kernel tensors."""
        return sum(weight.kernel_bytes for weight in self.weights)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parameters in high precision."""
        return sum(kept.nbytes for kept in self.kept)

    @property
    def bits_per_element(self) -> float:
        """Bits of kernel tensors for each element of the quantized weights."""
        return 8 * self.kernel_bytes / max(sum(math.prod(weight.shape) for weight in self.weights), 1)

    @property
    def source_bytes(self) -> int:
        """Bytes of all parameters in full precision: those that were quantized, and those kept."""
        return sum(weight.source_bytes for weight in self.weights) + self.kept_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data and the totals, ready for strict JSON: infinite decibels are the strings "inf" and "-inf"."""
        totals = ("kernel_bytes", "kept_bytes", "source_bytes", "bits_per_element")
        return _plain({**asdict(self), **{name: getattr(self, name) for name in totals}})

    def table(self) -> str:
        """One line a parameter, then the totals."""
        measured = any(weight.sqnr_db is not None for weight in self.weights)
        head = ["parameter", "stored as", "shape", "bits", "MiB", "why"]
        rows = [
            [
                weight.name,
                weight.method,
                "x".join(map(str, weight.shape)),
                f"{weight.bits_per_element:.2f}",
                _mib(weight.kernel_bytes),
                weight.reason,
            ]
            for weight in self.weights
        ]
        rows += [
            [kept.name, kept.dtype, "x".join(map(str, kept.shape)), "", _mib(kept.nbytes), kept.reason]
            for kept in self.kept
        ]
        if measured:
            head += ["SQNR dB", "worst block"]
            for row, weight in zip(rows, self.weights, strict=False):
                row += _error_cells(weight)
            for row in rows[len(self.weights) :]:
                row += ["", ""]
        changed = any(weight.changed_code_bytes is not None for weight in self.weights)
        if changed:
            head += ["code bytes changed", "scales changed"]
            for row, weight in zip(rows, self.weights, strict=False):
                row += [_count(weight.changed_code_bytes), _count(weight.changed_scales)]
            for row in rows[len(self.weights) :]:
                row += ["", ""]
        lines = _columns([head, *rows])
        share = self.kept_bytes / max(self.source_bytes, 1)
        lines.append(
            f"{len(self.weights)} weights quantized: {_mib(self.kernel_bytes)} MiB, {self.bits_per_element:.2f} "
            f"bits an element; {len(self.kept)} parameters kept: {_mib(self.kept_bytes)} of "
            f"{_mib(self.source_bytes)} MiB of full precision left unquantized ({share:.0%}); at most "
            f"{_mib(self.staged_peak_bytes)} MiB waited; {self.seconds:.2f} s"
        )
        apart = {weight.name for weight in self.weights}
        lines += [
            f"alias: {name} takes what arrives for {target}"
            + (", quantized apart from it" if name in apart else "")
            for name, target in self.aliases.items()
        ]
        lines += [f"surplus: {name} ({reason})" for name, reason in self.surplus.items()]
        lines += [f"untouched: {name}" for name in self.untouched]
        lines += [f"stale: {name} (outside the scope of this load)" for name in self.stale]
        lines += [f"derived: {name}" for name in self.derived]
        lines += [f"undeclared: {name} ({reason})" for name, reason in self.undeclared.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


@dataclass(frozen=True, slots=True)
class TensorStatus:
    """One parameter during a load.

    Args:
        name: full name.
        state: "arrived", "partly" (some elements), "missing" (required, nothing yet), "optional" (nothing, and it may
            stay so) or "stale" (outside the scope: it keeps its bytes).
        arrived: elements.
        total: elements.
    """

    name: str
    state: str
    arrived: int
    total: int


@dataclass(frozen=True)
class Status:
    """Where a load stands: what arrived, what is missing, what is stale.

    Args:
        tensors: every parameter.
    """

    tensors: Sequence[TensorStatus]

    @property
    def arrived(self) -> tuple[str, ...]:
        """Parameters that are complete."""
        return self._names("arrived")

    @property
    def missing(self) -> tuple[str, ...]:
        """Required parameters that are not complete."""
        return self._names("missing", "partly")

    @property
    def stale(self) -> tuple[str, ...]:
        """Parameters that keep the bytes of an earlier load."""
        return self._names("stale")

    def table(self) -> str:
        """One line a parameter, then the counts."""
        rows = [[one.name, one.state, f"{one.arrived} of {one.total}"] for one in self.tensors]
        counts = f"{len(self.arrived)} arrived, {len(self.missing)} missing, {len(self.stale)} stale"
        return "\n".join([*_columns([["parameter", "state", "elements"], *rows]), counts])

    def __str__(self) -> str:
        return self.table()

    def _names(self, *states: str) -> tuple[str, ...]:
        return tuple(one.name for one in self.tensors if one.state in states)


def _count(count: int | None) -> str:
    return "" if count is None else str(count)


def _error_cells(weight: WeightReport) -> list[str]:
    if weight.sqnr_db is None or weight.worst_db is None:
        return ["", ""]  # nothing but zeros, or loaded as codes
    return [f"{weight.sqnr_db:.1f}", f"{weight.worst_db:.1f} at {list(weight.worst_block or ())}"]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
