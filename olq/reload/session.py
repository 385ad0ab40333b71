"""One load of a model, from begin to commit or abort: names, accounting, and the report.

    new -> open -> committed
              \\--> aborted

A first load and a reload are the same; on a reload the kernel tensors exist and are written in place.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self, cast

from torch import Tensor, nn

from olq import patterns
from olq.errors import CoverageError, StateError, UnknownNameError
from olq.methods.state import FORMAT_SUFFIX
from olq.reload import online
from olq.reload.checks import check_shape, contradiction
from olq.reload.counter import CopyCounter, active_counter
from olq.reload.ledger import Ledger
from olq.reload.names import UNWRITTEN, Names, collect, near
from olq.reload.progress import PlainParameter, Progress, QuantizedWeight
from olq.reload.region import whole
from olq.reload.reporting import build_report
from olq.reload.sources import Source, Weights, open_source
from olq.reload.stage import Meter
from olq.report import Report

#: Called after each tensor with (bytes so far, bytes in all if known, name).
ProgressCallback = Callable[[int, int | None, str], object]


class Session:
    """A load or reload of a whole model. Use it as a context manager: leaving it commits, an error aborts.

    Args:
        model: has layers with quantized weights, from `prepare` or from `create_weights`.
        measure_error: keep SQNR and worst block of each weight, taken while its source is at hand. Costs a decode.
        allow_surplus: patterns of names that may arrive though nothing takes them.
        progress: called after each tensor.

    `feed` may be called from several threads.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        measure_error: bool = False,
        allow_surplus: Sequence[str] = (),
        progress: ProgressCallback | None = None,
    ) -> None:
        self.model = model
        self._measure, self._progress = measure_error, progress
        self._allowed = [patterns.parse(text, where="allow_surplus") for text in allow_surplus]
        self._meter = Meter()
        self._state = "new"
        self._done_bytes = 0
        self._surplus: dict[str, str] = {}
        self._aliases: dict[str, str] = {}

    def begin(self) -> Self:
        """Open all layers. From here to the commit a forward raises.

        Raises:
            StateError: the session has begun before, or a load of this model is open.
        """
        self._need("new", "begin")
        self._started_at = time.perf_counter()
        self.names: Names = collect(self.model, self._meter, self._measure)
        self._ledger = Ledger(self.names.progress)
        self._state = "open"
        return self

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != "open":
            return
        if error is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            if self._state == "open":
                self.abort()
            raise

    def feed(self, name: str, tensor: Tensor, *loader_args: Any) -> None:
        """Load one tensor. When it returns, the source has been consumed and may be reused.

        Args:
            name: a parameter's name, or that of a kernel tensor of a saved model.
            tensor: full precision, of the parameter's shape; or what the parameter's `weight_loader` takes.
            loader_args: passed to the `weight_loader`: a shard id, for example.

        Raises:
            UnknownNameError: nothing takes this name.
            SourceError: wrong shape or dtype.
            CoverageError: it has arrived already.
            NonFiniteError: it holds inf or NaN and its method refuses that.
            StateError: the session is not open.
        """
        self._need("open", "feed")
        if (saved := self.names.saved.get(name)) is not None and (
            name not in self.names.routes or _packed(tensor)
        ):
            self.names.release([name])
            online.restore(online.load_of(saved), name.rpartition(".")[2], tensor, name)
        elif (progress := self.names.routes.get(name)) is None:
            self._take_surplus(name)
        elif (other := self._arrived_as(progress, name)) is not None:
            self._compare_alias(name, other, progress, tensor)
        else:
            self._feed(name, progress, tensor, loader_args)
        self._done_bytes += tensor.numel() * tensor.element_size()

    def load(self, weights: Weights) -> None:
        """Load from a folder, a file, a mapping or an iterator.

        A model with a `load_weights(iterator)` of its own loads through it; otherwise names are parameter names.
        Where all names are known beforehand they are checked before anything is written.

        Raises:
            SourceError: the source can't be read.
            UnknownNameError: it holds names that nothing takes (all are listed, with those that are missing).
            CoverageError: parameters without a name in the source.
        """
        self._need("open", "load")
        source = open_source(weights)
        own_loader = getattr(self.model, "load_weights", None)
        if own_loader is None or self._is_saved(source):
            if source.names is not None:
                self._check_names(source)
                self.names.release(source.names)
            if isinstance(weights, Mapping):
                check_tags(cast("Mapping[str, Tensor]", weights), self.names)
            for name, tensor in source.items:
                self.feed(name, tensor)
                del tensor
                self._report_progress(source, name)
            return
        counter = self.counter()
        with counter.scope(source.where):
            own_loader(self._named(source, counter))

    def commit(self) -> Report:
        """Check that everything is there, put the kernel tensors in place, and go live.

        Raises:
            CoverageError: something is missing; it is named. The session stays open: feed the rest, or abort.
            StateError: the session is not open.
        """
        self._need("open", "commit")
        for layer in self.names.layers.values():
            online.check_parameters(layer)
        self._take_moved()
        missing = [
            text
            for name, layer in self.names.layers.items()
            if (text := online.finish_restored(online.load_of(layer), name))
        ]
        missing += [text for one in self.names.required if (text := one.missing())]
        if missing:
            raise missing_error(missing, self.names.progress, self._surplus)
        report = build_report(
            self.model,
            self.names,
            aliases=self._aliases,
            surplus=self._surplus,
            staged_peak=self._meter.peak,
            seconds=time.perf_counter() - self._started_at,
        )
        for layer in self.names.layers.values():
            online.install(layer)
        self.model.__dict__["quant_generation"] = report.generation
        for module in self.model.modules():
            module.__dict__.pop(UNWRITTEN, None)
        self._state = "committed"
        return report

    def counter(self) -> CopyCounter:
        """A counter for writes onto this model, for one thread."""
        return CopyCounter(self._ledger)

    def abort(self) -> None:
        """Give up.

        If nothing has been written yet, a model that was live is live again, as it was. Otherwise its quantized
        layers can't be called until a load of all of them commits.
        """
        self._need("open", "abort")
        for progress in self.names.progress:
            if isinstance(progress, PlainParameter) and self._ledger.moved(progress):
                progress.put_back(self._ledger.alias(progress))
        layers = self.names.layers.values()
        untouched = not any(progress.touched for progress in self.names.progress)
        untouched = untouched and not any(online.load_of(layer).restored for layer in layers)
        for layer in layers:
            online.abort(layer, untouched=untouched)
        self._state = "aborted"

    def _feed(self, name: str, progress: Progress, tensor: Tensor, loader_args: tuple[Any, ...]) -> None:
        loader = getattr(progress.parameter, "weight_loader", None)
        if isinstance(loader, online.WrappedLoader) and loader.loader is None:
            loader = None
        if loader is not None:
            counter = active_counter()
            if counter is None or counter.ledger is not self._ledger:  # that of another model's load
                counter = self.counter()
            with counter.scope(name, [progress] if isinstance(progress, PlainParameter) else ()):
                loader(progress.parameter, tensor, *loader_args)
            return
        check_shape(tensor, progress.parameter, progress.label, name)
        tensor = tensor.reshape(progress.parameter.shape)
        box = whole(progress.parameter.shape)
        counter = active_counter()
        with nullcontext() if counter is None else counter.paused():
            if isinstance(progress, QuantizedWeight):
                progress.arrive(box, tensor, name)
            elif isinstance(progress, PlainParameter):
                progress.copy(box, tensor, name)

    def _arrived_as(self, progress: Progress, name: str) -> str | None:
        """The other name of a tied parameter under which all of it has arrived, or None."""
        if not progress.coverage.complete:
            return None
        other = progress.coverage.find(whole(progress.coverage.shape))
        return other if other != name and other in self.names.routes else None

    def _compare_alias(self, name: str, other: str, progress: Progress, tensor: Tensor) -> None:
        """A tied parameter under its second name: equal bytes say nothing new, others are a contradiction."""
        if not progress.holds(tensor):
            raise contradiction(other, name)
        self._aliases[name] = other

    def _take_surplus(self, name: str) -> None:
        if not any(pattern.match(name) is not None for pattern in self._allowed):
            raise unknown_error([name], self.names.routes, where="feed")
        self._surplus[name] = "allowed by allow_surplus"

    def _check_names(self, source: Source) -> None:
        names = source.names or ()
        unknown = [
            n
            for n in names
            if n not in self.names.routes
            and n not in self.names.saved
            and not any(pattern.match(n) is not None for pattern in self._allowed)
        ]
        if unknown:
            raise unknown_error(unknown, self.names.routes, where=source.where)
        given = set(names)
        missing = [
            one.label
            for one in self.names.required
            if not one.coverage.count and not given.intersection(self.names.names_of(one))
        ]
        if missing:
            raise CoverageError(
                f"The source lacks {len(missing)} of the {len(self.names.required)} parameters of this model.",
                where=source.where,
                found=f"{len(given)} names, but not {_first(missing)}",
                need="every parameter of the model under its own name; nothing has been written yet",
                remedy="fetch the files that are missing, or check that checkpoint and model are of one kind",
            )

    def _is_saved(self, source: Source) -> bool:
        """Whether a source is the saved state of a quantized model."""
        return any(name in self.names.saved and name not in self.names.routes for name in source.names or ())

    def _named(self, source: Source, counter: CopyCounter) -> Iterator[tuple[str, Tensor]]:
        """The source's items; what a loader writes before it asks for the next one belongs to the last name."""
        for name, tensor in source.items:
            count = tensor.numel() * tensor.element_size()
            if active_counter() is not counter:  # a thread pulls ahead: items and writes don't alternate
                counter.eager = True
                yield name, tensor
            else:
                counter.flush(name)
                counter.seen = 0
                yield name, tensor
            del tensor
            self._done_bytes += count
            if not counter.eager:
                if not counter.seen:
                    self._surplus[name] = "the model's load_weights wrote nothing for it"
                counter.flush(source.where)  # before the source moves on: it may use the memory again
            self._report_progress(source, name)

    def _report_progress(self, source: Source, name: str) -> None:
        if self._progress is not None:
            self._progress(self._done_bytes, source.total_bytes, name)

    def _take_moved(self) -> None:
        """Parameters with memory of their own that somebody gave other memory: copy back, keep the address."""
        for progress in self.names.progress:
            if isinstance(progress, PlainParameter) and self._ledger.moved(progress):
                progress.overwrite(progress.put_back(self._ledger.alias(progress)))
                if not progress.coverage.count:
                    progress.arrive(whole(progress.coverage.shape), "parameter.data = ...")

    def _need(self, state: str, call: str) -> None:
        if self._state != state:
            raise StateError(
                f"{call}() is not legal now.",
                where=f"the session of a {type(self.model).__name__}",
                found=f"a session that is {self._state}",
                need=f"a session that is {state}",
                remedy="with olq.session(model) as s: s.feed(...); a session is used once",
            )


def missing_error(
    missing: Iterable[str], progress: Iterable[Progress], surplus: Mapping[str, str]
) -> CoverageError:
    """What to raise when parameters are not complete."""
    missing, progress = list(missing), list(progress)
    arrived = sum(one.coverage.complete for one in progress)
    hint = f"; wrote nothing: {', '.join(list(surplus)[:5])}" if surplus else ""
    return CoverageError(
        f"Parameters did not arrive completely: {len(missing)} of {len(progress)}.",
        where=_first(missing),
        found=f"{arrived} of {len(progress)} parameters complete{hint}",
        need="every element of every parameter",
        remedy="feed what is missing; a loader that copies in threads of its own is not seen",
    )


def _first(names: Sequence[str], most: int = 10) -> str:
    """Some names of a list, and how many there are beside them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def unknown_error(names: Sequence[str], routes: Mapping[str, Any], where: str) -> UnknownNameError:
    """What to raise for names that nothing takes."""
    shown = ", ".join(repr(name) + near(name, routes) for name in names[:10])
    return UnknownNameError(
        f"{len(names)} names belong to no parameter of this model.",
        where=where,
        found=shown + (f" and {len(names) - 10} more" if len(names) > 10 else ""),
        need=f"names of the {len(routes)} parameters of the model",
        remedy="rename them before feeding, or list them under allow_surplus",
    )


def check_tags(weights: Mapping[str, Any], names: Names) -> None:
    """Raise `LayoutError` if saved kernel tensors mean something else than this model stores; nothing is written."""
    for name, layer in names.saved.items():
        tag = weights.get(name) if name.endswith(FORMAT_SUFFIX) else None
        if isinstance(tag, Tensor):
            online.check_tag(online.load_of(layer), name.rpartition(".")[2], tag, name)


def _packed(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()
