"""CopyCounter: sees what a weight loader writes, without the loader knowing.

Parameters that are quantized stay on the meta device. A copy onto meta costs nothing, needs no memory and still tells
exactly where the data would have gone. The counter is a dispatch mode: inside `with counter.scope(name)` each write
onto a tracked parameter becomes an arrival (parameter, box, source), handed over when the outermost scope closes. Not
earlier, because a loader may write twice: within one scope the last write wins. If the scope raises, nothing arrives.

What it serves beside `copy_`: `_foreach_copy_`, `fill_`, `zero_`, `index_put_`, `index_copy_`, `out=`, random fills,
`parameter.data = x`, sources that the loader moves to the parameter's (meta) device or overwrites later, and reading
back or transforming in place what the same scope has written. What it can't serve it refuses by name. What it can't
see: writes by another thread than the scope's, and sources that are changed through NumPy inside a scope.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from olq.errors import LoaderError, OlqError
from olq.reload import operators
from olq.reload.checks import check_source, check_values
from olq.reload.ledger import Ledger, storage_key
from olq.reload.operators import COPY, tensors, written
from olq.reload.progress import PlainParameter, Progress, Stored, note_lost
from olq.reload.quantized import QuantizedWeight
from olq.reload.refusals import check_memory, refusal, wrong_shape
from olq.reload.region import whole
from olq.reload.views import mask_boxes, overlaps_itself, resolve, shown
from olq.reload.writes import Writes

if TYPE_CHECKING:
    from olq.reload.region import Box
    from olq.reload.trace import Trace

_active = threading.local()


def active_counter() -> "CopyCounter | None":
    """The counter whose scope is open in this thread, or None."""
    return getattr(_active, "counter", None)


class CopyCounter(TorchDispatchMode):
    """Turns writes onto tracked parameters into arrivals. One instance belongs to one thread at a time.

    Args:
        ledger: the parameters, with what is to happen to their arrivals.
        device: where tensors go that a loader makes on, or moves to, a parameter's (meta) device; None is where the
            first quantized weight is stored.
    """

    def __init__(self, ledger: Ledger, device: torch.device | None = None) -> None:
        super().__init__()
        self.ledger, self._device = ledger, device or ledger.device
        self._writes: dict[QuantizedWeight, Writes] = {}
        self._observed: dict[PlainParameter, list[tuple[Box, Tensor | None]]] = {}
        self._sources: set[int] = set()
        #: Open scopes.
        self.depth = 0
        self._paused, self.name = False, ""
        #: The first error raised inside a scope: `load_state_dict` turns exceptions into text.
        self.error: OlqError | None = None
        #: Writes seen since the outermost scope opened.
        self.seen = 0
        #: Whether scopes directly inside the outermost one hand over too: nobody else will before it closes.
        self.eager = False
        #: While set: gets every arrival that is handed over, and whatever says that it can't be replayed.
        self.trace: Trace | None = None

    def scope(self, name: str, plains: Iterable[PlainParameter] = ()) -> "_Scope":
        """One call of a loader, as a context manager that gives the counter.

        Arrivals of the outermost scope are handed over when it closes without an error.

        Args:
            name: what is being loaded, for messages and for the report.
            plains: parameters with memory of their own whose `data` the loader may assign to.
        """
        return _Scope(self, name, plains)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside a scope: what olq itself does to parameters and kernel tensors is nobody's write."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def flush(self, name: str | None = None) -> None:
        """Hand over what was written so far, as if the scope closed; go on under another name.

        If an arrival is refused, those of the same call before it are taken back: the call may be repeated.

        Args:
            name: name of what comes next; None keeps the present one.
        """
        if self._writes or self._observed:
            writes, observed = self._writes, self._observed
            self._forget()
            arrived: list[tuple[Progress, Box]] = []
            stored: Stored = []
            before, self._paused = self._paused, True
            try:
                for weight, mine in writes.items():
                    for box, source in mine.arrivals():
                        check_memory(source, weight.label, self.name)
                        weight.arrive(box, source, self.name, stored)
                        arrived.append((weight, box))
                        if self.trace is not None:
                            self.trace.arrivals.append((weight, box, source))
                for parameter, written in observed.items():
                    boxes = [box for box, _ in written]
                    arrived += [(parameter, box) for box in parameter.arrive_all(boxes, self.name, stored)]
                    if self.trace is not None:
                        self.trace.arrivals += [(parameter, box, source) for box, source in written]
            except BaseException:
                for progress, box in arrived:
                    progress.retract(box)
                note_lost(stored, self.name)
                raise
            finally:
                self._paused = before
        if name is not None:
            self.name = name

    def _open(self, name: str) -> "CopyCounter | None":
        """Begin the outermost scope; returns the counter that was active in this thread."""
        outer = active_counter()
        _active.counter, self.name, self.seen = self, name, 0
        return outer

    def _close(self, outer: "CopyCounter | None") -> None:
        """End the outermost scope, whatever happened in it."""
        self._forget()
        _active.counter = outer

    def _adopt(self, plains: Iterable[PlainParameter]) -> None:
        """Take the values of `parameter.data = x`, which emits no operator, and put the old memory back."""
        for parameter in plains:
            if self.ledger.moved(parameter):
                with self.paused():
                    values = parameter.put_back(self.ledger.alias(parameter))
                    box = whole(parameter.coverage.shape)
                    parameter.check_new(box, self.name)
                    parameter.overwrite(values)
                self._observed[parameter] = [(box, None)]
                self.seen += 1

    def _put_back(self, plains: Iterable[PlainParameter]) -> None:
        """After an error: the parameters' own memory, whatever the loader assigned to their `data`."""
        for parameter in plains:
            if self.ledger.moved(parameter):
                parameter.put_back(self.ledger.alias(parameter))

    def _forget(self) -> None:
        self._writes, self._observed, self._sources = {}, {}, set()

    def _see(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`__torch_dispatch__` of this mode."""
        try:
            return self._dispatch(func, args, kwargs or {})
        except OlqError as error:
            self.error = self.error or error
            raise

    def _dispatch(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused or func.is_view:  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        if func is COPY:
            return self._copy(args[0], args[1], kwargs)
        if func is operators.FOREACH_COPY:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, {})
            return None
        if self.trace is not None:
            self.trace.computed = True
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": self._device}  # a loader means the device where the weight will be
        quantized = next((t for t in tensors(args, kwargs) if self._is_quantized(t)), None)
        if quantized is None:
            return self._plain(func, args, kwargs)
        if func in operators.FACTORIES_LIKE:
            return func(*args, **{**kwargs, "device": self._device})
        return self._on_quantized(func, args, kwargs, self._label(quantized))

    def _copy(self, target: Tensor, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if not target.numel():
            return COPY(target, source, **kwargs)
        owners = self.ledger.find(target)
        if not owners:
            if target.device.type == "meta" and source.device.type != "meta":
                raise self._refuse(
                    "a copy onto a meta tensor that belongs to no tracked parameter", "an unknown tensor"
                )
            self._protect(target)
            if self.trace is not None:
                self.trace.computed = True
            return COPY(target, self._redirected(source), **kwargs)
        self.seen += 1
        source = self._redirected(self._value(source, owners[0]))
        if source.shape != target.shape:
            try:
                source = source.expand(target.shape)
            except RuntimeError:
                raise wrong_shape(owners[0].label, self.name, target, source) from None
        if isinstance(owners[0], QuantizedWeight):
            self._check_view(owners[0], target)
            check_source(source, owners[0].label, self.name)
            self._record(owners[0], target, source)
        else:
            for owner in owners:
                if target.dtype == owner.parameter.dtype:  # else bits are copied, not values
                    check_values(source, owner.parameter, owner.label, self.name)
            self._protect(target)
            self._observe(
                owners, target, lambda: COPY(self._redirected(target), source, **kwargs), source=source
            )
        return target

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that touches no quantized weight."""
        changed = list(written(func, args, kwargs))
        for tensor in changed:
            self._protect(tensor)
        overwrites = func in operators.CONSTANTS | operators.RANDOM | operators.SCATTERS
        if len(changed) != 1 or not (overwrites or operators.out_argument(func)):
            return self._run(func, args, kwargs)
        owners = self.ledger.find(changed[0])
        if not owners:
            return self._run(func, args, kwargs)
        self.seen += 1
        mask = operators.scatter_of_true(func, args)
        return self._observe(owners, changed[0], lambda: self._run(func, args, kwargs), mask)

    def _redirected(self, tensor: Tensor) -> Tensor:
        """Where a shadow load keeps these elements."""
        return self.ledger.redirect(tensor) if self.ledger.shadowed else tensor

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; in a shadow load on the new values of parameters instead of those that serve."""
        if not self.ledger.shadowed:
            return func(*args, **kwargs)
        meant: dict[int, Tensor] = {}

        def redirected(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(redirected(v) for v in value)
            if not isinstance(value, Tensor):
                return value
            twin = self.ledger.redirect(value)
            meant[id(twin)] = value
            return twin

        result = func(*redirected(args), **{k: redirected(v) for k, v in kwargs.items()})
        return meant.get(id(result), result) if isinstance(result, Tensor) else result

    def _on_quantized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], label: str) -> Any:
        """An operator that is neither a view nor a copy, on a quantized weight."""
        for tensor in written(func, args, kwargs):
            self._protect(tensor)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and self._is_quantized(first):
            weight = cast("QuantizedWeight", self.ledger.find(first)[0])
            if func in operators.CONSTANTS:
                return self._copy(first, self._constant(weight, *args[1:]), {})
            if func in operators.RANDOM:
                self.seen += 1
                self._into_memory(weight, first, lambda into: func(into, *args[1:], **kwargs))
                return first
            if func in operators.SCATTERS:
                self.seen += 1
                return self._scatter(weight, func, first, args, kwargs)
        name = operators.out_argument(func)
        if name is not None and isinstance(kwargs.get(name), Tensor) and self._is_quantized(kwargs[name]):
            return self._out(func, args, kwargs, name)
        return self._serve(func, args, kwargs, label)

    def _record(self, weight: QuantizedWeight, view: Tensor, source: Tensor) -> None:
        """Keep a write onto a quantized weight until the scope closes."""
        writes = self._writes_of(weight)
        mappings = resolve(weight.parameter, view)
        if mappings is None:
            if overlaps_itself(view):
                raise self._refuse("writes onto an expanded view, whose elements overlap", weight.label)
            self._into_memory(weight, view, lambda into: into.copy_(source))
            return
        for mapping in mappings:
            weight.check_new(mapping.box, self.name)
        for mapping in mappings:
            writes.put(mapping.box, mapping.source(source))
        self._sources.add(storage_key(source))

    def _observe(
        self,
        owners: tuple[Progress, ...],
        view: Tensor,
        write: Callable[[], Any],
        mask: Callable[[Tensor], Any] | None = None,
        source: Tensor | None = None,
    ) -> Any:
        """Run a write onto parameters with memory of their own and keep which elements it covers."""
        found: list[tuple[PlainParameter, list[tuple[Box, Tensor | None]]]] = []
        traced = self.trace is not None and source is not None
        for owner in owners:
            mappings = resolve(owner.parameter, view) if mask is None else None
            boxes: list[tuple[Box, Tensor | None]]
            if mappings is None:
                boxes = [(box, None) for box in mask_boxes(shown(owner.parameter, view, mask, view.device))]
            else:
                boxes = [
                    (m.box, m.source(source) if traced and source is not None else None) for m in mappings
                ]
            for box, _ in boxes:
                owner.check_new(box, self.name)
            found.append((cast("PlainParameter", owner), boxes))
            owner.touched = True
        result = write()
        for parameter, boxes in found:
            self._observed.setdefault(parameter, []).extend(boxes)
        return result

    def _scatter(
        self,
        weight: QuantizedWeight,
        func: Any,
        view: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """`index_put_` and `index_copy_`: run them on real memory, and again on a mask."""
        if any(t.device.type == "meta" for t in tensors(args[1:], {})):
            raise self._refuse(
                "writes through an index or from a source that is on the meta device", weight.label
            )
        if func is operators.aten.index_put_.default and (
            kwargs.get("accumulate") or (len(args) > 3 and args[3])
        ):
            raise self._refuse("accumulates into the parameter", weight.label)
        at = 3 if func is operators.aten.index_copy_.default else 2
        check_source(args[at], weight.label, self.name)
        rest = operators.on_device(args[1:], weight.device)
        mask = operators.scatter_of_true(func, (view, *rest))
        rest[at - 1] = rest[at - 1].to(weight.staged_dtype(args[at].dtype))
        self._into_memory(weight, view, lambda into: func(into, *rest, **kwargs), mask)
        return view

    def _into_memory(
        self,
        weight: QuantizedWeight,
        view: Tensor,
        write: Callable[[Tensor], Any],
        mask: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Write through the view's strides into memory of the rows that it touches."""
        self._check_view(weight, view)
        self._writes_of(weight).through(view, write, mask, lambda box: weight.check_new(box, self.name))

    def _out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        """An operator that returns its result through a quantized weight."""
        target: Tensor = kwargs[name]
        others = {k: v for k, v in kwargs.items() if k != name}
        device = next((t.device for t in tensors(args, others) if t.device.type != "meta"), self._device)
        fresh = torch.empty(target.shape, dtype=target.dtype, device=device)
        result = self._serve(func, args, {**others, name: fresh}, self._label(target))
        if result.shape != target.shape:
            raise wrong_shape(self._label(target), self.name, target, result)
        self._copy(target, result, {})
        return target

    def _serve(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], label: str) -> Any:
        """Run an operator that reads the parameter on what this scope has written."""
        served: dict[int, Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(real(v) for v in value)
            if not isinstance(value, Tensor) or not self._is_quantized(value):
                return value
            found = self._written(value)
            if found is None:
                raise self._refuse(f"reads or changes, by {func}, elements that it has not written", label)
            served[id(found)] = value
            return found

        result = func(*real(args), **{k: real(v) for k, v in kwargs.items()})
        return served.get(id(result), result) if isinstance(result, Tensor) else result

    def _constant(self, weight: QuantizedWeight, value: Any = 0) -> Tensor:
        """What `fill_` and `zero_` write, rounded as they would round it."""
        if isinstance(value, Tensor):
            return self._value(value, weight).to(weight.parameter.dtype)
        return torch.full((), value, dtype=weight.parameter.dtype, device=weight.device)

    def _value(self, source: Tensor, progress: Progress) -> Tensor:
        """A source with values: what this scope wrote, if the source is a tracked parameter itself."""
        if source.device.type != "meta":
            return source
        found = self._written(source)
        if found is None:
            raise self._refuse(
                "copies from a tensor on the meta device, which has no values (a parameter that was read, or moved to "
                "`parameter.device`)",
                progress.label,
            )
        return found.clone()

    def _written(self, view: Tensor) -> Tensor | None:
        """A quantized weight's view with the values that this scope has written, or None if some are missing."""
        owners = self.ledger.find(view)
        if not owners or owners[0] not in self._writes:
            return None
        self._check_view(cast("QuantizedWeight", owners[0]), view)
        return self._writes[cast("QuantizedWeight", owners[0])].read(view)

    def _writes_of(self, weight: QuantizedWeight) -> Writes:
        if weight not in self._writes:
            dtype = weight.staged_dtype(weight.parameter.dtype)
            self._writes[weight] = Writes(weight.parameter, dtype, weight.device)
        return self._writes[weight]

    def _protect(self, target: Tensor) -> None:
        """Snapshot sources that wait and are about to be overwritten: a copy means the value at its time."""
        if self._sources and storage_key(target) in self._sources:
            key = storage_key(target)
            for writes in self._writes.values():
                writes.snapshot(key)
            self._sources.discard(key)

    def _is_quantized(self, tensor: Tensor) -> bool:
        if tensor.device.type != "meta":
            return False
        owners = self.ledger.find(tensor)
        return bool(owners) and isinstance(owners[0], QuantizedWeight)

    def _refuse(self, found: str, where: str) -> LoaderError:
        return refusal(found, where, self.name)

    def _label(self, tensor: Tensor) -> str:
        return self.ledger.find(tensor)[0].label

    def _check_view(self, weight: QuantizedWeight, view: Tensor) -> None:
        if view.dtype != weight.parameter.dtype:
            raise self._refuse(
                f"uses the parameter's bits as {view.dtype}, by a view of another dtype", weight.label
            )


class _Scope:
    """See `CopyCounter.scope`. A class of its own, since a generator's context manager costs as much as a copy."""

    __slots__ = ("_counter", "_name", "_no_grad", "_outer", "_plains")

    def __init__(self, counter: CopyCounter, name: str, plains: Iterable[PlainParameter]) -> None:
        self._counter, self._name, self._plains = counter, name, plains

    def __enter__(self) -> CopyCounter:
        counter = self._counter
        if not counter.depth:
            self._outer = counter._open(self._name)
            self._no_grad = torch.no_grad()
            self._no_grad.__enter__()
            counter.__enter__()
        counter.depth += 1
        return counter

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        counter = self._counter
        counter.depth -= 1
        if not counter.depth:
            counter.__exit__(kind, error, trace)
            self._no_grad.__exit__(kind, error, trace)
        try:
            if error is None:
                counter._adopt(self._plains)
                if not counter.depth or (counter.eager and counter.depth == 1):
                    counter.flush()
        except OlqError as own:
            error = own
            raise
        finally:
            if isinstance(error, OlqError):
                counter.error = counter.error or error
            counter._put_back(self._plains)
            if not counter.depth:
                counter._close(self._outer)


# Not in the class body: torch wraps a method of this name in one that imports its compiler, 800 modules, on first use.
CopyCounter.__torch_dispatch__ = CopyCounter._see  # type: ignore[method-assign]
