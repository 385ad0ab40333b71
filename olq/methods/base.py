"""What a method is: a plan of kernel tensors, a way to fill them, and a forward that reads them.

A method sees whole *scale units* only: the loading core cuts what arrives into units (direct) and rests (staged), so
that a method never has to know about loaders, order or coverage.

Letters   N = rows (out_features), K = columns (in_features). A weight is [*lead, N, K]; `lead` are expert dimensions.
Parts     a fused layer's rows are cut into parts (q, k, v); each part is quantized as if it stood alone.
Formats   *load format* is what the checkpoint has; *kernel format* is what kernels read, padding included.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from olq import forward
from olq.alloc import TensorSpec
from olq.errors import LayoutError
from olq.frozen import explain
from olq.methods.guards import LOAD_DTYPES, guard
from olq.methods.state import find_state, make_state, require_live

#: Elements that a forward on the reference path decodes at once (float32: 16 MiB).
_DECODE_ELEMENTS = 4 << 20

#: An operator's name in `torch.ops.olq`, and its arguments by position.
Call = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A logical weight: [*lead, sum(parts), columns]."""

    lead: tuple[int, ...]
    parts: tuple[int, ...]
    columns: int

    @property
    def rows(self) -> int:
        """N, over all parts."""
        return sum(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the load-format parameter."""
        return (*self.lead, self.rows, self.columns)

    @property
    def starts(self) -> tuple[int, ...]:
        """First logical row of each part."""
        return tuple(accumulate(self.parts[:-1], initial=0))


@dataclass(frozen=True, slots=True)
class Target:
    """Whole scale units of one part, by logical position.

    Args:
        lead: one slice for each leading dimension.
        part: which part.
        rows: rows inside the part; a step other than 1 only where a unit is one row high.
        columns: columns, step 1.
    """

    lead: tuple[slice, ...]
    part: int
    rows: range
    columns: range


@dataclass(frozen=True)
class WeightPlan:
    """How one weight is stored: decided before the first byte arrives.

    Args:
        geometry: the logical weight.
        dtype: the load-format parameter's dtype; each source value is rounded to it first.
        unit: rows and columns of a scale unit inside a part; 0 stands for the part's whole extent.
        block: rows and columns of the elements that share one scale, for error figures; 0 as above.
        kernel_starts: first row of each part in the kernel format.
        tensors: kernel tensors by suffix: "" holds the codes, "_scale" and "_scale_2" the decode scales.
        tag: what the bytes mean, as JSON; saved beside them and compared when they are loaded again.
    """

    geometry: Geometry
    dtype: torch.dtype
    unit: tuple[int, int]
    block: tuple[int, int]
    kernel_starts: tuple[int, ...]
    tensors: Mapping[str, TensorSpec]
    tag: str

    @cached_property
    def kernel_bytes(self) -> int:
        """Bytes of all kernel tensors, padding included."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def unit_of(self, part: int) -> tuple[int, int]:
        """Rows and columns of a unit in `part`, at least 1 each."""
        rows, columns = self.unit
        return max(rows or self.geometry.parts[part], 1), max(columns or self.geometry.columns, 1)

    def whole(self, part: int) -> Target:
        """All of one part."""
        geometry = self.geometry
        return Target(
            lead=tuple(slice(0, n) for n in geometry.lead),
            part=part,
            rows=range(geometry.parts[part]),
            columns=range(geometry.columns),
        )


class MethodParams(BaseModel):
    """Parameters of a method: frozen, unknown keys forbidden. A method subclasses it as `Params`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Fields that say how the forward computes. Bytes don't depend on them, so they are no part of `format_tag`.
    forward_fields: ClassVar[frozenset[str]] = frozenset()


class SourceParams(MethodParams):
    """What a method makes of its sources.

    Args:
        nonfinite: `error` refuses a weight with inf or NaN; `saturate` takes inf as the largest value, NaN as 0.
        source_precision: `parameter` rounds a source to the parameter's dtype first; `keep` takes it as it comes.
    """

    nonfinite: Literal["error", "saturate"] = "error"
    source_precision: Literal["parameter", "keep"] = "parameter"


class ForwardParams(SourceParams):
    """How the forward of a built-in method computes: `path`, and `activations`, whose values each method lists.

    Args:
        path: `auto` is the first path of the table that holds; a name asks for that path, and a call that can't have
            it raises.
        nonfinite, source_precision: see `SourceParams`.
    """

    forward_fields: ClassVar[frozenset[str]] = frozenset({"activations", "path"})

    path: Literal["auto", "reference", "matmul", "scaled_mm"] = "auto"


class QuantMethod(ABC):
    """One way to store a weight. Subclass it, implement the abstract methods, register it.

    Args:
        params: fields of the class's `Params`.

    Raises:
        ConfigError: a parameter is unknown or has a value that is not allowed.
    """

    name: ClassVar[str]
    Params: ClassVar[type[MethodParams]] = MethodParams

    def __init__(self, **params: Any) -> None:
        try:
            self.params = self.Params(**params)
        except ValidationError as error:
            raise explain(error, self.Params, where=f"method {self.name!r}: ") from error
        forward.check_asked(getattr(self, "name", ""), self.params)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.params.model_dump().items())})"
        )

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.params == getattr(other, "params", None)

    def __hash__(self) -> int:
        return hash((type(self), self.params))

    @cached_property
    def title(self) -> str:
        """Name, and parameters that are not at their default, in words."""
        changed = self.params.model_dump(exclude_defaults=True)
        text = ", ".join(f"{key}={value}" for key, value in changed.items())
        return f"{self.name} ({text})" if text else self.name

    #: False for a method that leaves weights as they are: no kernel format, nothing deferred.
    quantizes: ClassVar[bool] = True

    @abstractmethod
    def plan(self, geometry: Geometry, dtype: torch.dtype) -> WeightPlan:
        """Decide units, kernel tensors and padding for one weight. No memory is made.

        Raises:
            LayoutError: this method can't store such a weight.
        """

    @abstractmethod
    def quantize_(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> bool:
        """Write the codes and scales of whole units.

        Args:
            source: [*lead, n, k] of `target`; bfloat16, float16, float32 or float64; any strides, any device.
            tensors: kernel tensors by suffix, as in `plan.tensors`.
            plan: this weight's plan.
            target: where the units are.

        Returns:
            False if a unit holds inf or NaN and the policy is to refuse it: the caller names the element. The bytes
            of such units are not to be used.
        """

    #: Whether `write_` and `finite` are there: units may be written first and judged later, many weights at once.
    judges_later: ClassVar[bool] = False

    def calls(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> Sequence[Call] | None:
        """What `write_` does, as data: calls in order, which whoever has many weights may make together.

        Returns:
            Each call's first argument is the source. None if `write_` is more than calls of operators, or is not there.
        """
        return None

    def write_(self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target) -> None:
        """`quantize_` without looking at the result, so that a GPU's stream does not wait. See `judges_later`.

        A method has `calls`, which are made here, or a `write_` of its own, not both.
        """
        calls = self.calls(source, tensors, plan, target)
        if calls is None:
            raise NotImplementedError
        for operator, arguments in calls:
            getattr(torch.ops.olq, operator)(*arguments)

    def finite(self, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Whether weights that have been written as a whole are usable, bool [len(weights)] on their device.

        Args:
            weights: kernel tensors by suffix, padding included; at least one, all on one device.
        """
        raise NotImplementedError

    @abstractmethod
    def dequantize_(
        self, out: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> None:
        """Decode whole units into `out`, [*lead, n, k] of `target`, float32, bfloat16 or float16."""

    @abstractmethod
    def write_padding_(self, tensors: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """Write every byte of the kernel tensors that `quantize_` never touches. Called once a session."""

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        dtype: torch.dtype,
        weight_loader: Callable[..., Any] | None = None,
        lead: Sequence[int] = (),
        device: torch.device | str | None = None,
        name: str = "weight",
        label: str = "",
        reason: str = "",
    ) -> nn.Parameter:
        """Register the load-format parameter of an engine's layer: right shape and dtype, on the meta device.

        Args:
            layer: gets the parameter, and `quant_method` if it has none yet.
            in_features: K.
            out_features: N, or the rows of each part of a fused layer.
            dtype: dtype of the checkpoint's weights; sources of other float dtypes are rounded to it.
            weight_loader: called as `weight_loader(parameter, tensor, ...)`; it copies into views of the parameter.
                None stands for a plain copy of the whole.
            lead: leading (expert) dimensions.
            device: where the kernel tensors will live; None is torch's default device (CPU under "meta").
            name: the parameter's name; kernel tensors are called `name`, `name_scale`, ...
            label: full path of the layer, for messages; `olq.load` fills it in where it is empty.
            reason: why the layer has this method, for the report: `decision.reason` of a `Resolver`.

        Returns:
            The parameter. It needs no memory.

        Raises:
            LayoutError: this method can't store such a weight.
        """
        parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        geometry = Geometry(tuple(lead), parts, in_features)
        _check_geometry(geometry, dtype, where=f"{label or type(layer).__name__}.{name}")
        target = torch.device(device) if device is not None else torch.get_default_device()
        target = torch.device("cpu") if target.type == "meta" else target
        parameter = self._make_parameter(geometry, dtype, target)
        if weight_loader is not None:
            vars(parameter)["weight_loader"] = weight_loader
        present = vars(layer).get("quant_method")
        if present is None:
            vars(layer)["quant_method"] = self
        elif present != self:
            raise LayoutError(
                "A layer has one method for all of its weights.",
                where=f"{label or type(layer).__name__}.{name}",
                found=f"{self}, after {present}",
                need="the layer's own quant_method",
                remedy="put weights that are stored differently into modules of their own",
            )
        layer.register_parameter(name, parameter)
        if self.quantizes:
            state = make_state(layer, target, label)
            state.plans[name] = self.plan(geometry, dtype)
            state.load_parameters[name] = parameter
            state.live, state.reason = False, reason
            guard(layer)
        return parameter

    def _make_parameter(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        return nn.Parameter(torch.empty(geometry.shape, dtype=dtype, device="meta"), requires_grad=False)

    def apply(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, *, name: str = "weight"
    ) -> Tensor:
        """`x @ W.T + bias` on the logical columns, by the path that `olq.forward.path` names.

        Args:
            layer: a live layer with this method's kernel tensors.
            x: [..., K]. Weights are decoded to its dtype (float64: through float32), or x is quantized too, where the
                method's `activations` says so.
            bias: [N] or None.
            name: the weight, where a layer has several.

        Returns:
            [..., N], dtype of `x`. Scratch of the reference path: 16 MiB of decoded weight, whatever the layer's size.

        Raises:
            ConfigError: no path computes this call, or not the one that was asked for.
            LayoutError: `x` has not K columns, or the weight has leading dimensions.
            StateError: the layer's weights are not all there.
        """
        return forward.linear(self.stored(layer, name), x, bias)

    def stored(self, layer: nn.Module, name: str = "weight") -> forward.Weight:
        """The layer's live weight as `olq.forward` reads it. Nothing is copied.

        Raises:
            LayoutError: the layer has no quantized weight of that name.
            StateError: the layer's weights are not all there.
        """
        require_live(layer)
        plan = plan_of(layer, name)
        tensors = kernel_tensors(layer, name, plan)
        return forward.Weight(
            label=_where(layer, name),
            method=self.name,
            params=self.params,
            lead=plan.geometry.lead,
            parts=plan.geometry.parts,
            starts=plan.kernel_starts,
            columns=plan.geometry.columns,
            block=plan.block,
            tensors=tensors,
            decoded=partial(self._decoded, plan, tensors),
        )

    def _decoded(
        self, plan: WeightPlan, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Bands of decoded rows, each with its first logical row."""
        through = dtype if dtype in LOAD_DTYPES else torch.float32
        for target in bands(plan):
            w = torch.empty(len(target.rows), len(target.columns), dtype=through, device=device)
            self.dequantize_(w, tensors, plan, target)
            yield plan.geometry.starts[target.part] + target.rows.start, w.to(dtype)


def bands(plan: WeightPlan) -> Iterator[Target]:
    """Row bands of each part of a matrix without leading dimensions, block-aligned, of bounded size."""
    columns = range(plan.geometry.columns)
    for part, rows in enumerate(plan.geometry.parts):
        unit, _ = plan.block
        unit = unit or 1  # a scale for the whole part does not keep its rows together
        step = max(_DECODE_ELEMENTS // max(len(columns), 1) // unit * unit, unit)
        for start in range(0, rows, step):
            yield Target((), part, range(start, min(start + step, rows)), columns)


def plan_of(layer: nn.Module, name: str = "weight") -> WeightPlan:
    """How the layer's weight `name` is stored.

    Raises:
        LayoutError: the layer has no quantized weight of that name.
    """
    state = find_state(layer)
    if state is None or name not in state.plans:
        raise LayoutError(
            "This layer has no such quantized weight.",
            where=_where(layer, name),
            found=f"quantized weights: {', '.join(state.plans) if state else 'none'}",
            need="a layer whose create_weights was called, or that prepare() took over",
            remedy="print the report that olq.load returned: it lists the layers that are quantized",
        )
    return state.plans[name]


def _where(layer: nn.Module, name: str) -> str:
    """A weight's full name, as far as it is known."""
    state = find_state(layer)
    return f"{(state.label if state else '') or type(layer).__name__}.{name}"


def kernel_tensors(layer: nn.Module, name: str, plan: WeightPlan) -> dict[str, Tensor]:
    """The live kernel tensors of one weight, by suffix. During a shadow load they stand beside the module."""
    state = find_state(layer)
    if state is not None and state.kernel:
        return {suffix: state.kernel[name + suffix] for suffix in plan.tensors}
    return {suffix: getattr(layer, name + suffix) for suffix in plan.tensors}


def format_tag(method: QuantMethod, geometry: Geometry, dtype: torch.dtype, **layout: object) -> str:
    """What a weight's bytes mean, as canonical JSON: equal tags, equal reading."""
    facts = {
        "method": method.name,
        "params": method.params.model_dump(mode="json", exclude=set(method.params.forward_fields)),
        "shape": list(geometry.shape),
        "parts": list(geometry.parts),
        "dtype": str(dtype).removeprefix("torch."),
        **layout,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _check_geometry(geometry: Geometry, dtype: torch.dtype, where: str) -> None:
    if dtype not in LOAD_DTYPES or min((*geometry.shape, *geometry.parts), default=0) < 0:
        raise LayoutError(
            "A load-format weight has to be a plain float matrix.",
            where=where,
            found=f"shape {list(geometry.shape)}, parts {list(geometry.parts)}, {dtype}",
            need="sizes that are not negative, and bfloat16, float16 or float32",
            remedy="pass the dtype of the checkpoint's full-precision weights",
        )
