"""CopyCounter: sees what a weight loader writes, without the loader knowing.

Parameters that are quantized stay on the meta device. A copy onto meta costs nothing, needs no memory and still tells
exactly where the data would have gone. The counter is a dispatch mode: inside `with counter.scope(name)` each write
onto a tracked parameter becomes an arrival (parameter, box, source), handed over when the outermost scope closes. Not
earlier, because a loader may write twice: within one scope the last write wins.

What it serves beside `copy_`: `_foreach_copy_`, `fill_`, `zero_`, `index_put_`, `index_copy_`, random fills,
`parameter.data = x`, sources that the loader moves to the parameter's (meta) device or overwrites later, and reading
back or transforming in place what the same scope has written. What it can't serve it refuses by name. What it can't
see: writes by another thread than the scope's, and sources that are changed through NumPy inside a scope.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from olq.errors import LoaderError, OlqError, SourceError
from olq.reload.ledger import Ledger, storage_key
from olq.reload.progress import PlainParameter, Progress, QuantizedWeight, check_source
from olq.reload.views import mask_boxes, overlaps_itself, resolve
from olq.reload.writes import Writes

if TYPE_CHECKING:
    from olq.reload.region import Box

aten = torch.ops.aten

_COPY = aten.copy_.default
#: Operators that replace every element of their first argument by something that no element of it enters.
_OVERWRITES = frozenset(
    {
        aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.uniform_.default, aten.normal_.default,
        aten.random_.default, aten.random_.to, getattr(aten.random_, "from"), aten.exponential_.default,
    }
)  # fmt: skip
_FACTORIES_LIKE = frozenset(
    {
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
        aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default,
    }
)  # fmt: skip
_SCATTERS = frozenset({aten.index_put_.default, aten.index_copy_.default})
_active = threading.local()


def active_counter() -> "CopyCounter | None":
    """The counter whose scope is open in this thread, or None."""
    return getattr(_active, "counter", None)


class CopyCounter(TorchDispatchMode):
    """Turns writes onto tracked parameters into arrivals. One instance belongs to one thread at a time.

    Args:
        ledger: the parameters, with what is to happen to their arrivals.
        device: where temporary tensors go that a loader makes on a parameter's (meta) device.
    """

    def __init__(self, ledger: Ledger, device: torch.device | None = None) -> None:
        super().__init__()
        self.ledger, self._device = ledger, device or torch.device("cpu")
        self._writes: dict[QuantizedWeight, Writes] = {}
        self._observed: dict[PlainParameter, list[Box]] = {}
        self._sources: set[int] = set()
        self._depth = 0
        self._handing_over = False
        self.name = ""
        #: The first error raised inside a scope: `load_state_dict` turns exceptions into text.
        self.error: OlqError | None = None
        #: Copies seen since the outermost scope opened.
        self.seen = 0

    @contextmanager
    def scope(self, name: str) -> Iterator["CopyCounter"]:
        """One call of a loader. Arrivals of the outermost scope are handed over when it closes without an error.

        Args:
            name: what is being loaded, for messages and for the report.
        """
        if self._depth:
            self._depth += 1
            try:
                yield self
            finally:
                self._depth -= 1
            return
        outer = active_counter()
        _active.counter, self.name, self.seen = self, name, 0
        self._depth = 1
        try:
            with torch.no_grad(), self:
                yield self
            self.flush()
        except OlqError as error:
            self.error = self.error or error
            raise
        finally:
            self._depth = 0
            self._forget()
            _active.counter = outer

    def flush(self, name: str | None = None) -> None:
        """Hand over what was written so far, as if the scope closed; go on under another name.

        Args:
            name: name of what comes next; None keeps the present one.
        """
        writes, observed = self._writes, self._observed
        self._forget()
        self._handing_over = True  # operators of the quantizer are nobody's writes
        try:
            for weight, written in writes.items():
                for box, source in written.arrivals():
                    weight.arrive(box, source, self.name)
            for parameter, boxes in observed.items():
                for box in boxes:
                    parameter.arrive(box, self.name)
        finally:
            self._handing_over = False
        if name is not None:
            self.name = name

    def _forget(self) -> None:
        self._writes, self._observed, self._sources = {}, {}, set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See the module's docstring."""
        kwargs = kwargs or {}
        if self._handing_over:
            return func(*args, **kwargs)
        if func is _COPY:
            return self._copy(args[0], args[1], kwargs)
        if func.is_view:  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, {})
            return None
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs = self._off_meta(func, args, kwargs)
        return self._other(func, args, kwargs)

    def _copy(self, target: Tensor, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        progress = self.ledger.find(target)
        if progress is None:
            if target.device.type == "meta" and source.device.type != "meta":
                raise self._refusal(
                    "a copy onto a meta tensor that belongs to no tracked parameter", "an unknown tensor"
                )
            self._protect(target)
            return _COPY(target, source, **kwargs)
        self.seen += 1
        if not target.numel():
            return target
        source = self._value(source, progress)
        try:
            expanded = source.expand(target.shape)
        except RuntimeError:
            raise self._wrong_shape(progress, target, source) from None
        if isinstance(progress, QuantizedWeight):
            check_source(source, progress.label, self.name)
            self._record(progress, target, expanded)
        else:
            self._observe(cast("PlainParameter", progress), target, lambda: _COPY(target, source, **kwargs))
        return target

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Everything that is neither a view nor a copy."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if not any(self._is_quantized(t) for t in _tensors(args, kwargs)):
            return self._plain(func, first, args, kwargs)
        if func in _FACTORIES_LIKE:
            return func(*args, **{**kwargs, "device": self._device})
        if first is not None and self._is_quantized(first):
            progress = cast("QuantizedWeight", self.ledger.find(first))
            if func in _OVERWRITES:
                self.seen += 1
                self._into_buffer(progress, first, lambda into: func(into, *args[1:], **kwargs))
                return first
            if func in _SCATTERS:
                self.seen += 1
                return self._scatter(progress, func, first, args, kwargs)
        return self._serve(func, args, kwargs)

    def _plain(self, func: Any, first: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that touches no quantized weight."""
        if first is None or not func._schema.is_mutable:
            return func(*args, **kwargs)
        self._protect(first)
        progress = self.ledger.find(first)
        if progress is None or func not in _OVERWRITES | _SCATTERS:
            return func(*args, **kwargs)
        self.seen += 1
        parameter = cast("PlainParameter", progress)
        return self._observe(parameter, first, lambda: func(*args, **kwargs), _mask_call(func, args))

    def _record(self, progress: QuantizedWeight, view: Tensor, source: Tensor) -> None:
        """Keep a write onto a quantized weight until the scope closes."""
        if overlaps_itself(view):
            raise self._refusal("writes onto an expanded view, whose elements overlap", progress.label)
        writes = self._writes_of(progress)
        mappings = None if writes.buffered else resolve(progress.parameter, view)
        if mappings is None:
            self._into_buffer(progress, view, lambda into: into.copy_(source))
            return
        for mapping in mappings:
            progress.check_new(mapping.box, self.name)
        for mapping in mappings:
            writes.put(mapping.box, mapping.source(source))
        self._sources.add(storage_key(source))

    def _observe(
        self,
        progress: PlainParameter,
        view: Tensor,
        write: Callable[[], Any],
        mask: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """Run a write onto a parameter with memory of its own and keep which elements it covers."""
        mappings = resolve(progress.parameter, view) if mask is None else None
        if mappings is None:
            boxes = list(mask_boxes(_shown(progress.parameter, view, mask, torch.device("cpu"))))
        else:
            boxes = [mapping.box for mapping in mappings]
        for box in boxes:
            progress.check_new(box, self.name)
        result = write()
        self._observed.setdefault(progress, []).extend(boxes)
        return result

    def _scatter(
        self,
        progress: QuantizedWeight,
        func: Any,
        view: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """`index_put_` and `index_copy_`: run them on the buffer, and again on the mask."""
        if any(t.device.type == "meta" for t in _tensors(args[1:], {})):
            raise self._refusal(
                "writes through an index or from a source that is on the meta device", progress.label
            )
        if func is aten.index_put_.default and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
            raise self._refusal("accumulates into the parameter", progress.label)
        source = 3 if func is aten.index_copy_.default else 2
        check_source(args[source], progress.label, self.name)
        call = list(args[1:])
        call[source - 1] = args[source].to(progress.parameter.dtype)
        self._into_buffer(progress, view, lambda into: func(into, *call, **kwargs), _mask_call(func, args))
        return view

    def _into_buffer(
        self,
        progress: QuantizedWeight,
        view: Tensor,
        write: Callable[[Tensor], Any],
        mask: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Write through the view's strides into memory of the whole parameter, and mark what was written."""
        buffer, written = self._writes_of(progress).buffer()
        fresh = _shown(progress.parameter, view, mask, written.device)
        for box in mask_boxes(fresh):
            progress.check_new(box, self.name)
        write(_same_view(buffer, progress.parameter, view))
        written |= fresh

    def _serve(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that reads the parameter on what this scope has written."""
        served: dict[int, Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(real(v) for v in value)
            if not isinstance(value, Tensor) or not self._is_quantized(value):
                return value
            found = self._written(value)
            if found is None:
                raise self._refusal("reads or changes elements that this call has not written", str(func))
            served[id(found)] = value
            return found

        result = func(*real(args), **{k: real(v) for k, v in kwargs.items()})
        return served.get(id(result), result) if isinstance(result, Tensor) else result

    def _value(self, source: Tensor, progress: Progress) -> Tensor:
        """A source with values: what this scope wrote, if the source is a tracked parameter itself."""
        if source.device.type != "meta":
            return source
        found = self._written(source)
        if found is None:
            raise self._refusal(
                "copies from a tensor on the meta device, which has no values (a parameter that was read, or moved to "
                "`parameter.device`)",
                progress.label,
            )
        return found.clone()

    def _written(self, view: Tensor) -> Tensor | None:
        """A quantized weight's view with the values that this scope has written, or None if some are missing."""
        progress = self.ledger.find(view)
        if not isinstance(progress, QuantizedWeight) or progress not in self._writes:
            return None
        buffer, written = self._writes[progress].buffer()
        if not bool(_same_view(written, progress.parameter, view).all()):
            return None
        return _same_view(buffer, progress.parameter, view)

    def _writes_of(self, weight: QuantizedWeight) -> Writes:
        if weight not in self._writes:
            self._writes[weight] = Writes(weight.parameter, weight.device)
        return self._writes[weight]

    def _protect(self, target: Tensor) -> None:
        """Snapshot sources that wait and are about to be overwritten: a copy means the value at its time."""
        if self._sources and storage_key(target) in self._sources:
            key = storage_key(target)
            for writes in self._writes.values():
                writes.snapshot(key)
            self._sources.discard(key)

    def _off_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keep values that a loader sends to the parameter's device, which is meta, where they are."""
        source = args[0] if args and isinstance(args[0], Tensor) else None
        device = source.device if source is not None and source.device.type != "meta" else self._device
        return {**kwargs, "device": device}

    def _is_quantized(self, tensor: Tensor) -> bool:
        return tensor.device.type == "meta" and isinstance(self.ledger.find(tensor), QuantizedWeight)

    def _refusal(self, found: str, where: str) -> LoaderError:
        return LoaderError(
            "A weight loader does something that can't be served without guessing.",
            where=f"{where}, while loading {self.name!r}",
            found=f"the loader {found}",
            need="plain copies into slices of the parameter, from tensors that have values",
            remedy="transform the source before copying it, or list the layer under `keep`",
        )

    def _wrong_shape(self, progress: Progress, target: Tensor, source: Tensor) -> SourceError:
        return SourceError(
            "A tensor does not fit the place that it is copied to.",
            where=f"{progress.label}, from {self.name!r}",
            found=f"a source of shape {list(source.shape)}, {source.dtype}",
            need=f"shape {list(target.shape)}, or one that broadcasts to it",
            remedy="check that checkpoint and model agree, and that the loader slices the source as it slices the parameter",
        )


def _same_view(tensor: Tensor, parameter: Tensor, view: Tensor) -> Tensor:
    """The view of `tensor` that `view` is of `parameter`; both dense with the same strides."""
    return tensor.as_strided(view.shape, view.stride(), view.storage_offset() - parameter.storage_offset())


def _shown(
    parameter: Tensor, view: Tensor, write: Callable[[Tensor], Any] | None, device: torch.device
) -> Tensor:
    """Mask, of the parameter's shape and strides, of what a write onto `view` covers."""
    mask = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.bool, device=device).fill_(
        False
    )
    part = _same_view(mask, parameter, view)
    if write is None:
        part.fill_(True)
    else:
        write(part)
    return mask


def _mask_call(func: Any, args: tuple[Any, ...]) -> Callable[[Tensor], Any] | None:
    """A scattering write, repeated with True for its values."""
    if func is aten.index_put_.default:
        return lambda shown: func(shown, args[1], torch.tensor(True, device=shown.device))
    if func is aten.index_copy_.default:
        return lambda shown: func(shown, args[1], args[2], torch.ones_like(args[3], dtype=torch.bool))
    return None


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))
