"""One load of a model, from begin to commit or abort: names, accounting, and the report.

    new -> open -> committed
              \\--> aborted

A first load and a reload are the same. On a reload the kernel tensors exist: they are written in place, or, with
`shadow`, at the commit; and names that were loaded before are replayed.
"""

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any, Self, Unpack, cast

from torch import Tensor, nn

from olq import patterns
from olq.errors import LoaderError, StateError
from olq.reload import commit, online, owner, saved
from olq.reload.accounting import check_arrived, check_names, check_tags, outside_error, unknown_error
from olq.reload.callbacks import run_callbacks
from olq.reload.carriers import Carrier, carrier_for
from olq.reload.checks import check_shape, contradiction
from olq.reload.counter import CopyCounter, active_counter
from olq.reload.ledger import Ledger
from olq.reload.names import UNWRITTEN, Names, collect
from olq.reload.options import DEFAULT_STAGING, LoadOptions, check_options
from olq.reload.plans import PLANS, Plans, whole_trace
from olq.reload.progress import PlainParameter, Progress
from olq.reload.quantized import QuantizedWeight, judge
from olq.reload.region import whole
from olq.reload.repeat import Repeat
from olq.reload.replay import Replay
from olq.reload.reporting import build_report, build_status
from olq.reload.scope import Scope
from olq.reload.sources import Source, Weights, open_source
from olq.reload.stage import Meter
from olq.reload.trace import Looks, Trace
from olq.reload.tree import Tree
from olq.report import Report, Status


class Session:
    """A load or reload of a model. Use it as a context manager: leaving it commits, an error aborts.

    Args:
        model: has layers with quantized weights, from `prepare` or from `create_weights`.
        options: see `LoadOptions`.

    Raises:
        ConfigError: an option or a pattern is not what it should be.

    `feed` may be called from several threads. A session is used once; a second one of the same model can begin when
    the first has ended. One in which nothing has arrived, or that was dropped, is aborted by that.
    """

    def __init__(self, model: nn.Module, **options: Unpack[LoadOptions]) -> None:
        self.model = model
        self._options = options
        check_options(options)
        self._progress = options.get("progress")
        self._scope = Scope(options.get("scope"))
        self._allowed = [
            patterns.parse(text, where="allow_surplus") for text in options.get("allow_surplus", ())
        ]
        self._meter = Meter()
        self._state = "new"
        self._done_bytes = 0
        self._surplus: dict[str, str] = {}
        self._aliases: dict[str, str] = {}

    def begin(self) -> Self:
        """Open the layers. From here to the commit a forward raises, unless the load is a shadow.

        With stable sources on a GPU, a load that repeats an earlier one leaves its layers in kernel format as long as
        every tensor is replayed; `counter`, `status` and whatever is new open them.

        Raises:
            StateError: the session has begun before, a load of this model is open, or the model is not live and a
                shadow or partial load needs it to be.
            ConfigError: a pattern of the scope matches nothing.
        """
        self._need("new", "begin")
        options, shadow = self._options, self._options.get("shadow")
        tree = Tree(self.model)
        owner.make_way(tree)
        if self._scope.partial or shadow:
            commit.need_servable(tree, "a partial load" if self._scope.partial else "a shadow load")
        self._started_at = time.perf_counter()
        try:
            self.names: Names = collect(
                tree,
                self._meter,
                options.get("measure_error", False),
                scope=self._scope,
                shadow=shadow,
                repeat=self._repeat(tree),
            )
        except BaseException:
            owner.undo(tree, self._meter)
            raise
        owner.take(self, shadow=bool(shadow))
        if self.names.repeat is not None:
            # Sources that wait go with the session, though its names stay known.
            weakref.finalize(self, self.names.repeat.drop).atexit = False
        if not shadow and self.names.repeat is None:  # which leaves no layer out
            commit.hold(tree, "a partial load of other layers of its model is open")
        names = self.names  # not the session: it would keep itself alive
        self._ledger = Ledger((*names.plain.values(), *names.outside.values()), later=lambda: names.weights)
        self._replay = Replay(
            self.model,
            self.names,
            stable=options.get("sources") == "stable",
            plan_key=options.get("plan_key"),
            enabled=options.get("replay", True),
        )
        if options.get("measure_changes"):
            commit.watch(self.names, shadow=bool(shadow))
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
        """Load one tensor. When it returns, the source has been consumed and may be reused, unless sources are stable.

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
        plan = self._replay.plan(name, tensor, loader_args)
        if plan is None or not self._replay.feed(plan, name, tensor):
            self._feed_new(name, tensor, loader_args)
        self._done_bytes += tensor.nbytes

    def _feed_new(self, name: str, tensor: Tensor, loader_args: tuple[Any, ...]) -> None:
        """Load a tensor that no recorded plan fits."""
        if (layer := self.names.saved.get(name)) is not None and (
            name not in self.names.routes or _packed(tensor)
        ):
            self.names.release([name])
            saved.restore(online.load_of(layer), name.rpartition(".")[2], tensor, name)
        elif (progress := self.names.routes.get(name)) is None:
            self._take_surplus(name)
        elif (other := self._arrived_as(progress, name)) is not None:
            self._compare_alias(name, other, progress, tensor)
        else:
            trace = self._feed(name, progress, tensor, loader_args)
            self._replay.record(name, loader_args, tensor, trace)

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
        source = open_source(weights, self._carrier, self._options.get("staging", DEFAULT_STAGING))
        try:
            self._load(source, weights)
        finally:
            source.close()  # also after an error, whose traceback would hold the items and what reads ahead of them

    def _carrier(self) -> Carrier | None:
        return carrier_for(self.names.devices, self._options.get("shadow"))

    def _load(self, source: Source, weights: Weights) -> None:
        if source.staged is not None and self._options.get("sources") == "stable":
            source = replace(source, items=self._flushed(source.items, source.staged.staging.buffer_bytes))
        own_loader = getattr(self.model, "load_weights", None)
        if own_loader is None or self.names.hold_saved(source.names or ()):
            if source.names is not None:
                check_names(self.names, source.names, source.where, self._allowed)
                self.names.release(source.names)
            if isinstance(weights, Mapping):
                check_tags(cast("Mapping[str, Tensor]", weights), self.names)
            for name, tensor in source.items:
                self.feed(name, tensor)
                del tensor
                self._report_progress(source, name)
            return
        items = source.items
        if self._replay.loop_only:
            first = self._replayed(source)
            if first is None:
                return  # no tensor is left for the loader: an empty stream could surprise it
            items = chain([first], items)
        counter = self.counter()
        counter.trace = around = Trace()  # of what the loader does before its first item, and after its last
        plains = [one for one in self.names.plain.values() if isinstance(one, PlainParameter)]
        try:
            with counter.scope(source.where, plains), Looks(counter):
                own_loader(self._named(items, source, counter, around))
        except Exception as error:
            if self._replay.count:
                error.add_note(
                    f"olq replayed {self._replay.count} tensors without load_weights, which saw the others only; "
                    "a loader that counts names, or fills in what it has not seen, needs replay=False"
                )
            raise
        self._replay.note_around(around)

    def _flushed(self, items: Iterable[tuple[str, Tensor]], most: int) -> Iterator[tuple[str, Tensor]]:
        """Items whose queue is written before it holds more than `most` bytes and one tensor on the device."""
        held = 0
        for name, tensor in items:
            if held and held + tensor.nbytes > most:
                self._replay.flush()
                held = 0
            held += tensor.nbytes
            yield name, tensor
            del tensor

    def _replayed(self, source: Source) -> tuple[str, Tensor] | None:
        """Replay the tensors at the head of a source; the first one that needs a loader, if there is any."""
        for name, tensor in source.items:
            if not self._repeated(name, tensor):
                return name, tensor
            self._done_bytes += tensor.nbytes
            del tensor
            self._report_progress(source, name)
        return None

    def _repeated(self, name: str, tensor: Tensor) -> bool:
        """Do with a tensor what the model's load_weights did with its like; False if that is not known."""
        plan = self._replay.plan(name, tensor)
        if plan is None:
            return False
        if not plan.copies:
            self._surplus[name] = "the model's load_weights wrote nothing for it"
            return True
        return self._replay.feed(plan, name, tensor)

    def flush(self) -> None:
        """Write the bytes of stable sources that are queued; they may be reused when it returns.

        On a GPU their reading has been enqueued on the current stream then; nothing waits for it.

        Raises:
            NonFiniteError: a queued tensor holds inf or NaN and its method refuses that. It may be fed again; those
                behind it wait for the next flush. On a GPU, where one look serves all, the commit raises it.
            StateError: the session is not open.
        """
        self._need("open", "flush")
        self._replay.flush()

    def status(self) -> Status:
        """What has arrived so far, what is missing, and what is stale because the scope leaves it out."""
        if self._state == "new":
            self._need("open", "status")
        return build_status(self.names)

    def commit(self) -> Report:
        """Check that everything is there, put the kernel tensors in place, refresh what is derived, and go live.

        Raises:
            CoverageError: something is missing; it is named. The session stays open: feed the rest, or abort.
            NonFiniteError: a weight that was fed from a stable source on a GPU got inf or NaN, and its method refuses
                that. The weight is named, and its load has to begin again.
            StateError: the session is not open.
            Exception: whatever a derived tensor or a hook raises. The session is aborted then: a shadow load leaves the
                old model, a load in place one that can't be called. What a callback of `on_commit` raises comes after
                the commit.
        """
        self._need("open", "commit")
        self._replay.flush()
        self._take_moved()
        check_arrived(self.names, self._surplus)
        tree = Tree(self.model)
        report = build_report(
            tree,
            self.names,
            aliases=self._aliases,
            surplus=self._surplus,
            staged_peak=self._meter.peak,
            changes=commit.changes(self.names),
            replayed=self._replay.count,
        )
        # The one wait for a GPU comes last: all that needs no answer has been done while it works.
        self._judge()
        try:
            report = commit.go_live(
                tree,
                self.names,
                report,
                shadow=bool(self._options.get("shadow")),
                partial=self._scope.partial,
            )
        except BaseException:
            self._state = "aborted"
            raise
        finally:
            owner.release(self)
        report = replace(report, seconds=time.perf_counter() - self._started_at)
        self._replay.commit(whole=not (self._scope.partial or self._options.get("shadow")))
        self.model.__dict__["quant_generation"] = report.generation
        for module in tree.modules:
            module.__dict__.pop(UNWRITTEN, None)
        self._state = "committed"
        run_callbacks(self.model, report)
        return report

    def counter(self) -> CopyCounter:
        """A counter for writes onto this model, for one thread."""
        self.names.open()
        return CopyCounter(self._ledger)

    def abort(self) -> None:
        """Give up.

        If nothing of the live model has been written, it is live again, as it was: always so in a shadow load.
        Otherwise its quantized layers can't be called until a load of all of them commits; `touched` names what was
        written, and so does the error of a forward.
        """
        self._need("open", "abort")
        owner.release(self)
        self._replay.drop()
        for progress in self.names.plain.values():
            if isinstance(progress, PlainParameter) and self._ledger.moved(progress):
                progress.put_back(self._ledger.alias(progress))
        commit.give_up(self.model, self.names, self.touched, shadow=bool(self._options.get("shadow")))
        self._state = "aborted"

    def _repeat(self, tree: Tree) -> Repeat | None:
        """A repeat of an earlier load, if this one may be that."""
        options = self._options
        plans: Plans | None = self.model.__dict__.get(PLANS)
        other = ("shadow", "scope", "measure_error", "measure_changes")
        if plans is None or plans.routine is None or any(options.get(name) for name in other):
            return None
        if options.get("sources") != "stable" or not options.get("replay", True):
            return None
        return Repeat.begin(plans.routine, tree)

    def _judge(self) -> None:
        """Raise if a weight is not usable that nobody has looked at."""
        if self.names.repeat is None or not self.names.repeat.finite():
            judge(self.names.weights)

    @property
    def touched(self) -> tuple[str, ...]:
        """Parameters that this load has written, or begun to write: in place, or in its shadow."""
        return commit.touched(self.names)

    def _feed(self, name: str, progress: Progress, tensor: Tensor, loader_args: tuple[Any, ...]) -> Trace:
        loader = getattr(progress.parameter, "weight_loader", None)
        if isinstance(loader, online.WrappedLoader) and loader.loader is None:
            loader = None
        if loader is not None:
            counter = active_counter()
            trace = Trace()
            if counter is None or counter.ledger is not self._ledger:  # that of another model's load
                counter = self.counter()
                counter.trace = trace
            plains = [progress] if isinstance(progress, PlainParameter) else ()
            with counter.scope(name, plains), Looks(counter):
                loader(progress.parameter, tensor, *loader_args)
            return trace
        check_shape(tensor, progress.parameter, progress.label, name)
        given, tensor = tensor, tensor.reshape(progress.parameter.shape)
        box = whole(progress.parameter.shape)
        counter = active_counter()
        with nullcontext() if counter is None else counter.paused():
            if isinstance(progress, QuantizedWeight):
                progress.arrive(box, tensor, name)
            elif isinstance(progress, PlainParameter):
                progress.copy(box, tensor, name)
        return whole_trace(progress, tensor) if tensor.shape == given.shape and tensor.numel() else Trace()

    def _arrived_as(self, progress: Progress, name: str) -> str | None:
        """The other name of a tied parameter under which all of it has arrived, or None."""
        if not progress.coverage.complete:
            return None
        other = progress.coverage.find(whole(progress.coverage.shape))
        return other if other != name and other in self.names.routes else None

    def _compare_alias(self, name: str, other: str, progress: Progress, tensor: Tensor) -> None:
        """A tied parameter under its second name: equal bytes say nothing new, others are a contradiction."""
        self._replay.flush()  # what is compared may still wait
        if not progress.holds(tensor):
            raise contradiction(other, name)
        self._aliases[name] = other

    def _take_surplus(self, name: str) -> None:
        if name in self.names.outside:
            raise outside_error([name], where="feed")
        if not any(pattern.match(name) is not None for pattern in self._allowed):
            raise unknown_error([name], self.names.routes, where="feed")
        self._surplus[name] = "allowed by allow_surplus"

    def _named(
        self, items: Iterable[tuple[str, Tensor]], source: Source, counter: CopyCounter, around: Trace
    ) -> Iterator[tuple[str, Tensor]]:
        """The source's items; what a loader writes before it asks for the next one belongs to the last name."""
        for name, tensor in items:
            self._done_bytes += tensor.nbytes
            if self._repeated(name, tensor):
                del tensor
                self._report_progress(source, name)
                continue
            if active_counter() is not counter:  # a thread pulls ahead: items and writes don't alternate
                counter.eager, counter.trace, around.computed = True, None, True
                yield name, tensor
                del tensor
            else:
                counter.flush(name)
                counter.seen, counter.trace = 0, Trace()
                yield name, tensor
                if not counter.eager:
                    if not counter.seen:
                        self._surplus[name] = "the model's load_weights wrote nothing for it"
                    counter.flush(source.where)  # before the source moves on: it may use the memory again
                    if counter.trace is not None:
                        self._replay.record(name, (), tensor, counter.trace)
                    counter.trace = around
                del tensor
            self._report_progress(source, name)

    def _report_progress(self, source: Source, name: str) -> None:
        if self._progress is not None:
            self._progress(self._done_bytes, source.total_bytes, name)

    def _take_moved(self) -> None:
        """Parameters with memory of their own that somebody gave other memory: copy back, keep the address."""
        for progress in self.names.plain.values():
            if isinstance(progress, PlainParameter) and self._ledger.moved(progress):
                if not progress.coverage.count:
                    raise _moved_error(progress.label)
                progress.overwrite(progress.put_back(self._ledger.alias(progress)))

    def _need(self, state: str, call: str) -> None:
        if self._state != state:
            raise StateError(
                f"{call}() is not legal now.",
                where=f"the session of a {type(self.model).__name__}",
                found=f"a session that is {self._state}",
                need=f"a session that is {state}",
                remedy="with olq.session(model) as s: s.feed(...); a session is used once",
            )


def _packed(tensor: Tensor) -> bool:
    return not tensor.is_floating_point()


def _moved_error(label: str) -> LoaderError:
    return LoaderError(
        "A parameter got other memory during a load, and nothing arrived for it.",
        where=label,
        found="parameter.data = ... outside every loader, or to_empty()",
        need="values that come through a loader, feed or load, so that they can be told from uninitialised memory",
        remedy="feed the parameter, or assign its data inside its weight_loader",
    )
