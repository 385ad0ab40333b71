"""Any sequence of begins, feeds, errors, aborts, commits and calls leaves what the laws of loading say.

`Truth` says it in a few lines of Python: which version each memory holds, whether the model may be called, what has
arrived. Bytes are compared with a cold load of a fresh model after each step.
"""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import olq
from olq.errors import CoverageError, NonFiniteError, StateError, UnknownNameError
from reload.engine_layers import bytes_of
from reload.machine_model import (
    FEEDS,
    LABELS,
    LOADED,
    LOOP_NAMES,
    QUEUED,
    SCOPES,
    SHAPES,
    VERSIONS,
    FaultError,
    Truth,
    cold,
    group_of,
    make,
    value,
)
from reload.small_models import TOKENS, tensors

EVERY = frozenset(SHAPES)
ITEMS, NUMBERS = st.sampled_from(sorted(SHAPES)), st.sampled_from(VERSIONS)
MODES = st.fixed_dictionaries(
    {
        "scope": st.one_of(st.none(), st.sets(st.sampled_from(sorted(SCOPES)), min_size=1, max_size=3)),
        "shadow": st.sampled_from((None, "device", "host")),
        "sources": st.sampled_from(("transient", "stable")),
        "replay": st.sampled_from((True, True, False)),
    }
)
ENDS = ("none", "rest", "rest", "nan", "abort", "drop")
FLOATS = st.sampled_from((torch.bfloat16, torch.bfloat16, torch.float32))


def items_of(scope: set[str] | None) -> set[str]:
    """What a scope covers."""
    return set(EVERY) if scope is None else set().union(*(SCOPES[name] for name in scope))


class Machine(RuleBasedStateMachine):
    """A model, the session that is open, and what must be true of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.truth, self.session = make(), Truth(), None
        self.live: dict[str, Tensor] = {}  # aliases of what the first commit installed
        self.at: dict[str, tuple] = {}
        self.told: list[int] = []
        olq.on_commit(self.model, lambda model, report: self.told.append(report.generation))

    @initialize(number=NUMBERS, times=st.sampled_from((0, 1, 1, 1)))
    def start(self, number: int, times: int) -> None:
        """Most often begin with a model that is live and has plans."""
        for _ in range(times):
            self.begin({"scope": None, "shadow": None, "sources": "transient", "replay": True})
            self.feed_the_rest_and_commit(number, torch.bfloat16)

    def teardown(self) -> None:
        """End what is open: tensors of a load that nobody gave up have to be written by somebody."""
        if self.truth.load is not None:
            session = olq.session(self.model).begin() if self.truth.load.dropped else self.session
            session.abort()

    # Beginnings and ends

    def tell(self, mode: dict) -> bool:
        """Tell `truth` of a begin. Whether it is legal."""
        shadow, stable = bool(mode["shadow"]), mode["sources"] == "stable"
        return self.truth.begin(items_of(mode["scope"]), shadow, stable, mode["replay"])

    def is_over(self, old: olq.Session | None) -> None:
        """A session in which nothing had arrived is over when another has begun, or has tried to."""
        if old is not None:
            with pytest.raises(StateError, match=r"a session that is aborted"):
                old.commit()

    @rule(
        mode=MODES,
        fed=st.sets(ITEMS),
        number=NUMBERS,
        dtype=FLOATS,
        end=st.sampled_from(ENDS),
        data=st.data(),
    )
    def begin_and_feed(
        self, mode: dict, fed: set[str], number: int, dtype: torch.dtype, end: str, data
    ) -> None:
        """A story in one step: what needs four rules in a row seldom happens by itself."""
        before = self.truth.load
        self.begin(mode)
        if self.truth.load is before or not self.is_open:
            return
        for item in sorted(fed & self.outstanding):
            self.feed_item(item, number, dtype)
        if end == "nan" and self.may_be_nan:
            self.feed_nan(data)
            self.flush()
        elif end == "rest":
            self.feed_the_rest_and_commit(number, dtype)
        elif end in ("abort", "drop"):
            getattr(self, end)()

    def begin(self, mode: dict) -> None:
        """Begin if that is legal, or see it refused."""
        load, old, session = self.truth.load, self.session, olq.session(self.model, **mode)
        if self.tell(mode):
            self.session = session.begin()
        else:
            with pytest.raises(StateError, match=r"open already|needs a model that can be called"):
                session.begin()
        if self.truth.load is not load:
            self.is_over(old)

    @precondition(lambda self: self.is_open)
    @rule()
    def abort(self) -> None:
        self.truth.abort()
        self.session.abort()
        self.session = None

    @precondition(lambda self: self.is_open)
    @rule()
    def drop(self) -> None:
        self.truth.load.dropped = True
        gone = weakref.ref(self.session)
        self.session = None
        gc.collect()  # errors of earlier steps may hold it
        assert gone() is None

    @precondition(lambda self: self.is_open)
    @rule()
    def flush(self) -> None:
        if self.truth.flush():
            self.session.flush()
        else:
            with pytest.raises(NonFiniteError):
                self.session.flush()

    @precondition(lambda self: self.is_open)
    @rule()
    def commit(self) -> None:
        load = self.truth.load
        if not self.truth.flush():
            with pytest.raises(NonFiniteError):
                self.session.commit()
        elif missing := self.truth.missing():
            with pytest.raises(CoverageError) as error:
                self.session.commit()
            assert all(name in error.value.where for name in missing)
            assert f": {len(missing)} of " in str(error.value)
        else:
            self.truth.commit()
            self.committed(self.session.commit(), load)
            self.session = None

    @precondition(lambda self: self.is_open)
    @rule(number=NUMBERS, dtype=FLOATS)
    def feed_the_rest_and_commit(self, number: int, dtype: torch.dtype) -> None:
        for item in sorted(self.outstanding):
            self.feed_item(item, number, dtype)
        self.commit()

    def committed(self, report: olq.Report, load) -> None:
        """Look at a report, and at addresses."""
        assert (report.generation, report.replayed) == (self.truth.generation, load.replayed)
        assert set(report.stale) == {n for n, items in LABELS.items() if not load.items.issuperset(items)}
        if not self.live:
            self.live = {name: tensor.detach() for name, tensor in tensors(self.model).items()}
            self.at = self.places()

    # Feeds

    def feed_item(self, item: str, number: int | None, dtype: torch.dtype) -> None:
        """Feed what has not arrived; None is a version with NaN in it."""
        tensor = value(item, number or 1).to(dtype)
        if number is None:
            tensor = tensor.clone()
            tensor[-1, -1] = float("nan")
        if item == "emb":
            self.truth.load.emb_name = "emb.weight"
        if self.truth.feed(item, number, FEEDS[item], dtype):
            self.session.feed(FEEDS[item][0], tensor, *FEEDS[item][1:])
        else:
            with pytest.raises(NonFiniteError, match=FEEDS[item][0]):
                self.session.feed(FEEDS[item][0], tensor, *FEEDS[item][1:])

    @precondition(lambda self: self.is_open)
    @rule(item=ITEMS, number=NUMBERS, dtype=FLOATS)
    def feed(self, item: str, number: int, dtype: torch.dtype) -> None:
        load = self.truth.load
        if item not in load.items:
            with pytest.raises(UnknownNameError, match="outside the scope"):
                self.session.feed(FEEDS[item][0], value(item, number), *FEEDS[item][1:])
        elif item == "emb":
            self.feed_under_either_name(number, "emb.weight")
        elif item in load.arrived:
            with pytest.raises(CoverageError, match="arrived twice"):
                self.session.feed(FEEDS[item][0], value(item, number).to(dtype), *FEEDS[item][1:])
        else:
            self.feed_item(item, number, dtype)

    @precondition(lambda self: self.may_be_nan)
    @rule(data=st.data())
    def feed_nan(self, data) -> None:
        self.feed_item(data.draw(st.sampled_from(sorted(self.may_be_nan))), None, torch.bfloat16)

    @precondition(lambda self: self.is_open)
    @rule()
    def feed_unknown(self) -> None:
        with pytest.raises(UnknownNameError, match=r"1 names belong to no parameter"):
            self.session.feed("nobody.weight", torch.ones(2))

    @precondition(lambda self: self.is_open and "emb" in self.truth.load.items)
    @rule(number=NUMBERS, name=st.sampled_from(("emb.weight", "head.weight")))
    def feed_under_either_name(self, number: int, name: str) -> None:
        load = self.truth.load
        if "emb" not in load.arrived:
            load.emb_name = name
            self.truth.feed("emb", number, ("emb.weight",), torch.bfloat16)
            self.session.feed(name, value("emb", number))
        elif name != load.emb_name and number == load.arrived["emb"]:
            if self.truth.flush():  # what is compared may wait
                self.session.feed(name, value("emb", number))
            else:
                with pytest.raises(NonFiniteError):
                    self.session.feed(name, value("emb", number))
        elif name == load.emb_name:
            with pytest.raises(CoverageError, match="arrived twice"):
                self.session.feed(name, value("emb", number))
        elif self.truth.flush():
            with pytest.raises(CoverageError, match="two names with different values"):
                self.session.feed(name, value("emb", number))
        else:
            with pytest.raises(NonFiniteError):
                self.session.feed(name, value("emb", number))

    @precondition(lambda self: LOADED & self.outstanding)
    @rule(number=NUMBERS, data=st.data())
    def feed_a_loader_that_fails(self, number: int, data) -> None:
        load, item = self.truth.load, data.draw(st.sampled_from(sorted(LOADED & self.outstanding)))
        owner = {"q": self.model.qkv, "k": self.model.qkv, "v": self.model.qkv, "norm": self.model}.get(item)
        owner = owner or self.model.down
        owner.fail = True
        try:
            if load.plans.get(FEEDS[item]) == torch.bfloat16:
                self.feed_item(item, number, torch.bfloat16)  # replayed: no loader runs
                return
            with pytest.raises(FaultError):
                self.session.feed(FEEDS[item][0], value(item, number), *FEEDS[item][1:])
        finally:
            owner.fail = False
        if item == "norm":
            load.touched = True
            if not load.shadow:
                self.truth.memory["norm"] = None

    @precondition(lambda self: self.is_open)
    @rule(chosen=st.sets(ITEMS, min_size=1), number=NUMBERS, data=st.data())
    def load_through_the_models_own_loop(self, chosen: set[str], number: int, data) -> None:
        order = data.draw(st.permutations(sorted(chosen & self.outstanding)))
        if order:
            self.session.load(self.items(order, number))

    def items(self, order: list[str], number: int):
        """(name, tensor) for the model's loop, told to `truth` as each is asked for."""
        for item in order:
            if item == "emb":
                self.truth.load.emb_name = "emb.weight"
            self.truth.feed(item, number, (LOOP_NAMES[item],), torch.bfloat16)
            yield LOOP_NAMES[item], value(item, number)

    @rule(mode=MODES, number=NUMBERS, lacks=st.one_of(st.none(), st.none(), ITEMS), data=st.data())
    def load_in_one_call(self, mode: dict, number: int, lacks: str | None, data) -> None:
        order = data.draw(st.permutations(sorted(items_of(mode["scope"]) - {lacks})))
        before, old = self.truth.load, self.session
        if not order:
            return
        if not self.tell(mode):
            with pytest.raises(StateError, match=r"open already|needs a model that can be called"):
                olq.load(self.model, [], **mode)
            if self.truth.load is not before:
                self.is_over(old)
            return
        self.session = None
        load, weights = self.truth.load, list(self.items(order, number))
        self.truth.flush()
        source = dict(weights) if data.draw(st.booleans()) else iter(weights)
        if load.items == set(order):
            self.truth.commit()
            self.committed(olq.load(self.model, source, **mode), load)
        else:
            self.truth.abort()
            with pytest.raises(CoverageError, match="did not arrive completely"):
                olq.load(self.model, source, **mode)

    # Everything else

    @rule()
    def forget_plans(self) -> None:
        self.truth.plans = {}
        olq.forget_plans(self.model)

    @rule()
    def take_the_fingerprint(self) -> None:
        in_kernel_format = self.truth.load is None or self.truth.load.items <= {"bias", "norm"}
        if self.truth.callable and in_kernel_format:
            assert dict(olq.fingerprint(self.model).digests) == self.expected().digests
        else:
            with pytest.raises(StateError):
                olq.fingerprint(self.model)

    @precondition(lambda self: self.truth.load is None)
    @rule(number=NUMBERS)
    def copy_the_model(self, number: int) -> None:
        twin = copy.deepcopy(self.model)
        if self.truth.servable:
            assert torch.equal(twin(TOKENS), self.expected().logits)
        olq.load(twin, {LOOP_NAMES[item]: value(item, number) for item in SHAPES})
        wanted = cold((number,) * len(SHAPES))
        assert {name: bytes_of(tensor) for name, tensor in tensors(twin).items()} == wanted.bytes

    # What is always true

    @property
    def is_open(self) -> bool:
        """Whether there is a session that can be used."""
        return self.truth.load is not None and not self.truth.load.dropped

    @property
    def outstanding(self) -> set[str]:
        """Items that have not arrived."""
        return self.truth.load.items - self.truth.load.arrived.keys() if self.is_open else set()

    @property
    def may_be_nan(self) -> set[str]:
        """Items whose values are looked at as they arrive, or when the queue is written."""
        single = (QUEUED | {"emb"}) & self.outstanding - {"d0", "d1"}
        halves = {"d0", "d1"} & self.outstanding
        return single | halves if len(halves) == 1 and not self.truth.load.stable else single

    def expected(self):
        """The cold load that the memory has to equal."""
        return cold(tuple(version or 1 for version in self.truth.memory.values()))

    def places(self) -> dict[str, tuple]:
        """Address, shape, strides and dtype of each tensor of the live model."""
        return {n: (t.data_ptr(), t.shape, t.stride(), t.dtype) for n, t in tensors(self.model).items()}

    @invariant()
    def memory_holds_the_bytes_of_cold_loads(self) -> None:
        for name, tensor in self.live.items():
            derived = name in ("mirror", "mid.decoded")
            versions = self.truth.derived if derived else self.truth.memory
            if all(versions[item] is not None for item in group_of(name)):
                wanted = cold(tuple(version or 1 for version in versions.values()))
                assert bytes_of(tensor) == wanted.bytes[name], name

    @invariant()
    def addresses_stay(self) -> None:
        if self.live and self.truth.servable and self.truth.load is None:
            assert self.places() == self.at

    @invariant()
    def calls_are_legal_exactly_when_the_model_is_whole(self) -> None:
        x = {
            "qkv": torch.ones(1, 32),
            "down": torch.ones(1, 80),
            "mid": torch.ones(1, 32),
            "head": torch.ones(1, 32),
        }
        if self.truth.callable:
            assert torch.equal(self.model(TOKENS), self.expected().logits)
            return
        with pytest.raises(StateError, match="called before its weights were complete"):
            self.model(TOKENS)
        for name, given in x.items():
            with pytest.raises(StateError, match="called before its weights were complete"):
                getattr(self.model, name)(given.bfloat16())

    @invariant()
    def the_session_says_what_has_arrived(self) -> None:
        if not self.is_open:
            return
        load, status = self.truth.load, self.session.status()
        inside = {n for n, items in LABELS.items() if load.items.issuperset(items)}
        assert set(status.missing) == self.truth.missing()
        assert set(status.arrived) == inside - self.truth.missing()
        assert set(status.stale) == LABELS.keys() - inside
        assert bool(self.session.touched) == load.touched

    @invariant()
    def commits_are_counted_and_told(self) -> None:
        assert self.model.__dict__.get("quant_generation", 0) == self.truth.generation
        assert self.told == list(range(1, self.truth.generation + 1))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.parametrize("shadow", [None, "device", "host"])
@pytest.mark.parametrize("end", ["abort", "drop"])
def test_what_is_queued_when_a_load_ends_is_never_written(shadow, end):
    """A story that the machine seldom draws."""
    machine = Machine()
    machine.start(number=1, times=1)
    machine.begin({"scope": None, "shadow": shadow, "sources": "stable", "replay": True})
    for item in ("q", "d0", "d1", "mid"):
        machine.feed_item(item, 2, torch.bfloat16)
    assert len(machine.truth.load.queue) == 4
    getattr(machine, end)()
    machine.memory_holds_the_bytes_of_cold_loads()
    machine.calls_are_legal_exactly_when_the_model_is_whole()
    machine.teardown()
    machine.memory_holds_the_bytes_of_cold_loads()
