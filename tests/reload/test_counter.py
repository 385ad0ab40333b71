"""CopyCounter by itself: scopes, the order of writes, sources that change, parameters with memory of their own."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, LoaderError, SourceError
from olq.reload.counter import CopyCounter, active_counter
from olq.reload.ledger import Ledger
from olq.reload.progress import PlainParameter, Progress
from olq.reload.region import slices
from reload.engine_layers import bytes_of
from reload.programs import Values, programs


def plain(
    shape: tuple[int, ...] = (4, 6), label: str = "p", dtype: torch.dtype = torch.float32
) -> PlainParameter:
    return PlainParameter(label, nn.Parameter(torch.full(shape, float("nan"), dtype=dtype)))


def counter_of(*progress: Progress) -> CopyCounter:
    return CopyCounter(Ledger(progress))


def copied(p: Tensor) -> None:
    p.copy_(torch.ones_like(p))


def by_rows(p: Tensor) -> None:
    for row in p.unbind():
        row.copy_(torch.ones(row.shape))


def by_data(p: Tensor) -> None:
    p.data[:] = 1.0


def filled(p: Tensor) -> None:
    p[:2].fill_(1.0)
    p[2:].fill_(torch.tensor(1.0))


def zeroed_then_filled(p: Tensor) -> None:
    p.zero_()
    p[:, ::2] = 1.0
    p[:, 1::2] = torch.ones(4, 3)


def by_index(p: Tensor) -> None:
    p[torch.tensor([0, 2])] = torch.ones(2, 6)
    p.index_copy_(0, torch.tensor([1, 3]), torch.ones(2, 6))


def by_list(p: Tensor) -> None:
    p[[0, 2]] = torch.ones(2, 6)
    p[[True, False, False, True], 1:] = 1.0
    p[3, 0] = 1.0
    p[1] = 1.0


def by_mask(p: Tensor) -> None:
    mask = torch.arange(24).view(4, 6) % 5 < 3
    p[mask] = 1.0
    p[~mask] = torch.ones(int((~mask).sum()))


def by_foreach(p: Tensor) -> None:
    torch._foreach_copy_([p[:1], p[1:]], [torch.ones(1, 6), torch.ones(3, 6)])


def by_out(p: Tensor) -> None:
    torch.cat([torch.ones(2, 6), torch.ones(2, 6)], out=p.data)


def by_diagonals(p: Tensor) -> None:
    for k in range(-3, 6):
        p.diagonal(k).copy_(torch.ones(p.diagonal(k).shape))


def as_other_bits(p: Tensor) -> None:
    p.data.view(torch.int32).copy_(torch.ones_like(p).view(torch.int32))


def as_bytes(p: Tensor) -> None:
    p.data.view(torch.uint8).copy_(torch.ones_like(p).view(torch.uint8))


def transformed(p: Tensor) -> None:
    p.copy_(torch.zeros_like(p))
    p.copy_(torch.exp(p))
    p.data.mul_(1)


@pytest.mark.parametrize(
    "write",
    [
        copied, by_rows, by_data, filled, zeroed_then_filled, by_index, by_list, by_mask, by_foreach, by_out,
        by_diagonals, as_other_bits, as_bytes, transformed,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_parameter_with_memory_is_written_as_ever_and_covered_once(write):
    progress = plain()
    with counter_of(progress).scope("w"):
        write(progress.parameter)
    assert (progress.parameter == 1).all()
    assert progress.coverage.complete
    assert progress.coverage.count == 24
    assert progress.parameter.requires_grad
    assert progress.parameter.grad_fn is None


@settings(max_examples=80)
@given(data=st.data())
def test_any_program_of_writes_covers_what_it_writes(data):
    """The first call's steps alone, then what they leave, then the other calls; beside them the same on bare memory."""
    shape = data.draw(st.sampled_from([(9, 7), (3, 6, 5)]))
    progress = plain(shape)
    bare = torch.full(shape, float("nan"))
    counter = counter_of(progress)
    for i, call in enumerate(data.draw(programs(shape))):
        values, view = Values(call.seed), bare[call.band.start : call.band.stop]
        for step in call.steps:
            step.run(view, values)
        with counter.scope(f"call {i}"), torch.no_grad():
            values, view = Values(call.seed), progress.parameter[call.band.start : call.band.stop]
            for step in call.steps:
                step.run(view, values)
        assert bytes_of(progress.parameter) == bytes_of(bare)
        assert progress.coverage.count == int((~torch.isnan(bare)).sum())
        missing = torch.zeros(shape, dtype=torch.bool)
        for box in progress.coverage.missing(limit=10**6):
            missing[slices(box)] = True
        assert torch.equal(missing, torch.isnan(bare))
        with counter.scope(f"rest of call {i}"), torch.no_grad():
            rest = torch.isnan(bare[call.band.start : call.band.stop])
            progress.parameter[call.band.start : call.band.stop][rest] = 1.0
            bare[call.band.start : call.band.stop][rest] = 1.0
    assert progress.coverage.complete


@pytest.mark.parametrize("write", [by_rows, by_index, by_mask, by_foreach, by_out, as_bytes])
def test_a_second_call_for_the_same_elements_names_both_and_writes_nothing(write):
    progress = plain()
    counter = counter_of(progress)
    with counter.scope("first"):
        progress.parameter[2:].copy_(torch.zeros(2, 6))
    with pytest.raises(CoverageError) as error, counter.scope("second"):
        write(progress.parameter)
    assert error.value.found == "'first', and then 'second'"
    assert error.value.where.startswith("p[")
    assert (progress.parameter[2:] == 0).all()
    assert progress.coverage.count == 12


def test_what_only_transforms_covers_nothing():
    progress = plain()
    with counter_of(progress).scope("w"), torch.no_grad():
        progress.parameter.mul_(2)
        progress.parameter.masked_fill_(torch.ones(4, 6, dtype=torch.bool), 1.0)
        torch._foreach_add_([progress.parameter], 1)
    assert not progress.coverage.count


def test_a_raising_scope_counts_nothing_and_can_be_repeated():
    progress = plain()
    counter = counter_of(progress)

    def broken() -> None:
        with counter.scope("w"):
            progress.parameter.copy_(torch.ones(4, 6))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert not progress.coverage.count
    assert active_counter() is None
    with counter.scope("w"):
        progress.parameter.copy_(torch.ones(4, 6))
    assert progress.coverage.complete


def test_scopes_nest_and_the_outermost_one_hands_over():
    a, b = plain(label="a"), plain(label="b")
    counter = counter_of(a, b)
    with counter.scope("outer"):
        with counter.scope("inner"):
            a.parameter.copy_(torch.ones(4, 6))
        assert not a.coverage.count
        assert active_counter() is counter
        b.parameter.copy_(torch.ones(4, 6))
    assert a.coverage.names == b.coverage.names == ["outer"]
    assert active_counter() is None


def test_another_counter_inside_a_scope_sees_its_own_parameters_only():
    a, b = plain(label="a"), plain(label="b")
    with counter_of(a).scope("a"):
        with counter_of(b).scope("b"):
            a.parameter.copy_(torch.ones(4, 6))
            b.parameter.copy_(torch.ones(4, 6))
        assert b.coverage.complete
    assert a.coverage.complete
    assert b.coverage.names == ["b"]


def test_parameters_in_one_flat_storage_are_told_apart():
    flat = torch.full((60,), float("nan"))
    left = PlainParameter("left", nn.Parameter(flat[:40].view(4, 10)[:, :4]))
    right = PlainParameter("right", nn.Parameter(flat[:40].view(4, 10)[:, 4:]))
    tail = PlainParameter("tail", nn.Parameter(flat[40:]))
    counter = counter_of(left, right, tail)
    with counter.scope("right"):
        right.parameter.copy_(torch.ones(4, 6))
    assert (left.coverage.count, right.coverage.count, tail.coverage.count) == (0, 24, 0)
    with counter.scope("rest"):
        flat[:40].view(4, 10)[:, 1:4].copy_(torch.ones(4, 3))
        flat[40:50].fill_(1.0)
    assert (left.coverage.count, right.coverage.count, tail.coverage.count) == (12, 24, 10)
    with pytest.raises(CoverageError, match="arrived twice"), counter.scope("all"):
        flat.copy_(torch.ones(60))


def test_a_write_onto_the_flat_storage_covers_every_parameter_in_it():
    flat = torch.full((50,), float("nan"))
    parts = [
        PlainParameter(f"p{i}", nn.Parameter(flat[10 * i + 3 : 10 * i + 9].view(2, 3))) for i in range(5)
    ]
    with counter_of(*parts).scope("flat"):
        flat.copy_(torch.arange(50.0))
    assert all(part.coverage.complete for part in parts)


def test_quantized_codes_are_no_values_of_a_float_parameter():
    progress = plain(dtype=torch.bfloat16)
    counter = counter_of(progress)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8):
        with pytest.raises(SourceError, match="already quantized"), counter.scope("w"):
            progress.parameter.copy_(torch.ones(4, 6).to(dtype))
        with pytest.raises(SourceError, match="already quantized"):
            progress.copy((range(4), range(6)), torch.ones(4, 6).to(dtype), "w")
    assert torch.isnan(progress.parameter).all()
    codes = PlainParameter("codes", nn.Parameter(torch.zeros(4, 6, dtype=torch.uint8), requires_grad=False))
    codes.copy((range(4), range(6)), torch.ones(4, 6, dtype=torch.uint8), "w")
    exponents = torch.full((4, 6), 2.0).to(torch.float8_e8m0fnu)  # values, not codes: a checkpoint's scales
    with counter.scope("w"):
        progress.parameter.copy_(exponents)
    assert (progress.parameter == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assigned_data_is_copied_and_the_address_stays(dtype):
    progress = plain()
    counter = counter_of(progress)
    address = progress.parameter.data_ptr()
    given = torch.randn(4, 6).to(dtype)
    with counter.scope("w", [progress]):
        progress.parameter.data = given
    assert progress.parameter.data_ptr() == address
    assert progress.parameter.dtype == torch.float32
    assert torch.equal(progress.parameter, given.float())
    assert progress.coverage.complete
    with pytest.raises(CoverageError, match="'w', and then 'again'"), counter.scope("again", [progress]):
        progress.parameter.data = given + 1
    assert progress.parameter.data_ptr() == address
    assert torch.equal(progress.parameter, given.float())


def test_assigned_data_of_another_shape_is_refused_and_the_address_stays():
    progress = plain()
    address = progress.parameter.data_ptr()
    with pytest.raises(SourceError, match=r"shape \[3, 6\]"), counter_of(progress).scope("w", [progress]):
        progress.parameter.data = torch.ones(3, 6)
    assert progress.parameter.data_ptr() == address
    assert progress.parameter.shape == (4, 6)
    assert not progress.coverage.count


def test_assigned_data_is_forgotten_when_the_scope_raises():
    progress = plain()
    address = progress.parameter.data_ptr()

    def broken() -> None:
        with counter_of(progress).scope("w", [progress]):
            progress.parameter.data = torch.ones(4, 6)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert progress.parameter.data_ptr() == address
    assert torch.isnan(progress.parameter).all()


def test_a_write_after_assigned_data_is_kept():
    progress = plain()
    with counter_of(progress).scope("w", [progress]):
        progress.parameter.data = torch.zeros(4, 6)
        progress.parameter[1].copy_(torch.ones(6))
    assert progress.parameter.sum(1).tolist() == [0, 6, 0, 0]


def test_a_flush_goes_on_under_another_name():
    a, b = plain(label="a"), plain(label="b")
    counter = counter_of(a, b)
    with counter.scope("first"):
        a.parameter.copy_(torch.ones(4, 6))
        counter.flush("second")
        assert a.coverage.names == ["first"]
        b.parameter.copy_(torch.ones(4, 6))
    assert b.coverage.names == ["second"]


def test_a_paused_counter_looks_away():
    progress = plain()
    counter = counter_of(progress)
    with counter.scope("w"):
        with counter.paused():
            progress.parameter.copy_(torch.ones(4, 6))
        assert counter.seen == 0
    assert not progress.coverage.count


def test_an_unknown_meta_tensor_is_refused_and_unknown_memory_is_left_alone():
    counter = counter_of(plain())
    buffer = torch.zeros(3)
    with counter.scope("w"):
        buffer.copy_(torch.ones(3))
        torch.zeros(3, device="meta").copy_(torch.ones(3))  # made in the scope: memory of its own
    assert (buffer == 1).all()
    foreign = torch.zeros(3, device="meta")
    with pytest.raises(LoaderError, match="belongs to no tracked parameter"), counter.scope("w"):
        foreign.copy_(torch.ones(3))


def test_two_threads_that_write_the_same_elements_are_found():
    progress = plain()
    ledger = Ledger([progress])
    meet = threading.Barrier(2, timeout=30)
    errors: list[Exception] = []

    def write() -> None:
        try:
            with CopyCounter(ledger).scope("w"):
                progress.parameter.copy_(torch.ones(4, 6))
                meet.wait()
        except CoverageError as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert progress.coverage.complete


def test_no_source_outlives_its_scope():
    progress = plain()
    source = torch.ones(4, 6)
    alive = weakref.ref(source)
    with counter_of(progress).scope("w"):
        progress.parameter.copy_(source)
        del source
    gc.collect()
    assert alive() is None


def test_the_ledger_knows_storages_not_addresses():
    """An empty parameter has none; a freed storage's identity may come back, so the ledger keeps an alias."""
    empty, full = plain((0, 6)), plain()
    ledger = Ledger([empty, full])
    ledger.add(full)
    assert ledger.find(empty.parameter) == ()
    assert ledger.find(full.parameter.detach()[1:, ::2].t()) == (full,)
    assert ledger.find(full.parameter.clone()) == ()
    assert not ledger.moved(full)
    full.parameter.data = full.parameter.data.clone()
    assert ledger.moved(full)
    assert ledger.find(ledger.alias(full)) == (full,)
    full.parameter.data = ledger.alias(full).reshape(2, 12)
    assert ledger.moved(full)


def test_counting_does_not_load_the_compiler():
    program = """
import sys, torch, olq
from olq.reload.counter import CopyCounter
from olq.reload.ledger import Ledger
from olq.reload.progress import PlainParameter
p = PlainParameter("p", torch.nn.Parameter(torch.zeros(3)))
with CopyCounter(Ledger([p])).scope("w"):
    p.parameter.copy_(torch.ones(3))
print(p.coverage.complete, "torch._dynamo" in sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(olq.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
