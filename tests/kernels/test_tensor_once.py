"""One scale for a whole matrix in one launch: programs that wait for each other write what the reference writes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.compare import DEVICES, INTERPRETED, assert_equal, bit_patterns, fp8_call, weight
from torch import Tensor

from numerics.cases import poison, weights
from olq import kernels
from olq.kernels import launching, plan_tensor, plans, tiles
from olq.kernels.shapes import Launch, Matrices, Plan, matrices_of
from olq.numerics import fp8

UNIT = 2 * tiles.UNIT_WORDS
LEAST, LARGEST = tiles.LEAST_TOGETHER, tiles.LARGEST_TOGETHER
PLAIN = None, False
"""Elements are neither rounded nor saturated."""

_compiled = launching._compiled
ONCE = ("tensor_once.clear", "tensor_once.quantize_tensor")
SWEEPS = ("tensor.amax_partials", "tensor.quantize_tensor")


@pytest.fixture
def sizes(device, monkeypatch):
    """(programs, elements of a unit, of all units that are held): few for the interpreter, which runs one program."""
    if device == "cuda":
        return tiles.TOGETHER, UNIT, LEAST
    for name, value in few(1, 1024, 9, 3).items():
        monkeypatch.setattr(tiles, name, value)
    return 1, 2048, 9 * 2048  # more than one program of another kernel holds


def few(programs: int, words: int, held: int, ahead: int) -> dict[str, object]:
    """Other sizes than those of `tiles`."""
    least = programs * held * 2 * words
    return {
        "TOGETHER": programs, "UNIT_WORDS": words, "HELD": (held,), "HELD_AHEAD": ahead, "LEAST_TOGETHER": least,
    }  # fmt: skip


def spread(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Numbers from 0.1 to 0.9 of either sign."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.rand(shape, generator=generator) * 1.6 - 0.8
    return (w + torch.where(w < 0, -0.1, 0.1)).to(dtype)


def planned(w: Tensor) -> Plan:
    """One launch for a matrix, and the one in front."""
    found = plans.plan(*fp8_call(w, (0, 0)))
    assert isinstance(found, Plan)
    assert found.together is not None
    return found.together


def reference(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale."""
    want = poison(*w.shape), poison(1, 1, dtype=torch.float32)
    fp8.quantize_(w, *want, (0, 0))
    return want


def assert_at_once(w: Tensor, device: str, power_of_two: bool = False) -> None:
    """Also that it is launched, not only planned."""
    launched = []

    def compiled(one: Launch, *rest: Any) -> Any:
        launched.append(one.kernel)
        return _compiled(one, *rest)

    launching._READY.clear()  # as if it were the first call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "_compiled", compiled)
        assert_equal(*fp8_call(w, (0, 0), power_of_two), device)
    assert tuple(launched) == ONCE


@DEVICES
@pytest.mark.parametrize("each", [0, 1, 3, 6, 7, 11, 15])
@pytest.mark.parametrize("rest", [0, 2, 34])
def test_any_number_of_units_and_a_rest(each, rest, device, sizes):
    programs, unit, least = sizes
    some = 0 if rest == 34 else programs // 3  # programs with one more than the others
    w = spread(2, (least + (each * programs + some) * unit + rest) // 2, seed=each)
    assert_at_once(w, device)
    w.view(-1)[-1 - each * unit] = -3.0
    assert_at_once(w, device)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("finite", [True, False])
def test_every_kind_of_number(dtype, finite, device, sizes):
    programs, unit, least = sizes
    w = bit_patterns(4, (least + 9 * programs * unit + 24) // 4, dtype=dtype, finite=finite)
    for power_of_two in (False, True):
        assert_at_once(w, device, power_of_two)


@DEVICES
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, torch.nan, -torch.inf])
@pytest.mark.parametrize("at", [0, 77, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_number_among_zeros(value, at, dtype, device, sizes):
    _, unit, least = sizes
    w = torch.zeros(2, (least + 5 * unit + 10) // 2, dtype=dtype)
    w.view(-1)[at], w.view(-1)[at - 5] = value, -0.0
    assert_at_once(w, device)


def of_small_units(
    w: Tensor, programs: int, held: int, ahead: int
) -> tuple[tuple[Launch, ...], list[Tensor]]:
    """Launches with units of 32 elements, and their tensors: w, codes, scale and slots."""
    codes, scale = poison(*w.shape), poison(1, 1, dtype=torch.float32)
    shape = matrices_of(w, codes, scale)
    assert isinstance(shape, Matrices)
    constants: dict[str, object] = {"POWER": False, "THROUGH": "", "LARGEST": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in few(programs, 16, held, ahead).items():
            patch.setattr(tiles, name, value)
        found = plan_tensor.one_scale(shape, w, codes, scale, constants).together
    assert found is not None
    assert found.scratch == programs
    return found.launches, [w, codes, scale, torch.zeros(programs)]


def magnitudes(w: Tensor, programs: int) -> Tensor:
    """The largest of each program's elements as bits, of units of 32 elements: int32."""
    bits = w.flatten().view(torch.int16).int() & 0x7FFF
    whole = bits.numel() // 32 * 32
    units = bits[:whole].view(-1, 32).amax(1)
    largest = torch.stack([units[p::programs].max() for p in range(programs)])
    if whole < bits.numel():
        largest[0] = torch.maximum(largest[0], bits[whole:].max())
    return largest


@INTERPRETED
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize(("held", "ahead"), [(1, 2), (3, 1), (2, 3)])
@pytest.mark.parametrize("rest", [0, 10])
def test_each_program_finds_and_writes_its_part_cpu(programs, held, ahead, rest):
    """Slots hold already what other programs will find, so that one after the other waits for nobody."""
    for each in (held + ahead, held + 3 * ahead + 1):
        units = programs * each + (programs - 1) // 2
        dtype = torch.float16 if rest else torch.bfloat16
        w = spread(2, (32 * units + rest) // 2, dtype=dtype, seed=units)
        for nth in range(each + 1):  # each program's largest is in each of its units once
            v = w.clone()
            for unit in range(nth * programs, min((nth + 1) * programs, units + (rest > 0))):
                v.view(-1)[32 * unit + 7] = -2.0 - unit % programs / 8
            (_, one), tensors = of_small_units(v, programs, held, ahead)
            largest = magnitudes(v, programs)
            tensors[3].view(torch.int32).copy_(largest)
            with np.errstate(all="ignore"):
                launching.launch_once(one, tensors)
            want = reference(v)
            assert tensors[3].view(torch.int32).equal(largest), (units, nth)
            assert all(a.equal(b) for a, b in zip(tensors[1:3], want, strict=True)), (units, nth)


@INTERPRETED
def test_slots_are_emptied_first_cpu():
    (clear, _), tensors = of_small_units(spread(2, 320), 5, 1, 1)
    tensors[3] = torch.full((9,), 7.0)
    launching.launch_once(clear, tensors)
    slots = tensors[3].view(torch.int32)
    assert (slots[:5] > 0x7FFF).all()  # more than any magnitude
    assert tensors[3][5:].eq(7.0).all()


@pytest.mark.cuda
def test_whatever_its_slots_held_before():
    w = spread(512, 8192)
    w[300, 4000] = 2.5
    found, want = planned(w), reference(w)
    for held in (0, 1, 0x3F00, 0x7FFF, -1):
        tensors = [w.cuda(), poison(*w.shape).cuda(), poison(1, 1, dtype=torch.float32).cuda()]
        tensors.append(
            torch.full((tiles.TOGETHER,), held, dtype=torch.int32, device="cuda").view(torch.float32)
        )
        for one in found.launches:
            launching.launch_once(one, tensors)
        assert tensors[1].cpu().equal(want[0]), held
        assert tensors[2].cpu().equal(want[1]), held


@pytest.mark.cuda
@pytest.mark.parametrize("held", tiles.HELD)
def test_as_many_units_in_registers_as_there_are(held):
    w = weight(held * 66 + 11, 8192)
    assert planned(w).launches[1].constants["HELD"] == held
    assert_at_once(w, "cuda")


@pytest.mark.cuda
@given(units=st.integers(0, 3000), w=weights(4, 96), place=st.floats(0, 1))
def test_drawn_rows_anywhere_in_a_matrix(units, w, place):
    every = torch.zeros(LEAST + units * UNIT, dtype=torch.bfloat16)
    start = int(place * (every.numel() - w.numel()))
    every[start : start + w.numel()] = w.to(torch.bfloat16).flatten()
    assert_at_once(every.view(2, -1), "cuda")


@pytest.mark.cuda
def test_many_calls_on_two_streams_at_once():
    w = weight(2048, 8192).cuda()
    want = poison(*w.shape).cuda(), torch.empty(1, 1, device="cuda")
    assert kernels.path("quantize_fp8_", w, *want, 0, 0, False, *PLAIN).kernels == ONCE
    torch.ops.olq.quantize_fp8_(w, *want, 0, 0, False, *PLAIN)
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = [(poison(*w.shape).cuda(), torch.empty(1, 1, device="cuda")) for _ in range(40)]
    torch.cuda.synchronize()
    for i, outputs in enumerate(found):
        with torch.cuda.stream(streams[i % 2]):
            torch.ops.olq.quantize_fp8_(w, *outputs, 0, 0, False, *PLAIN)
    torch.cuda.synchronize()
    for outputs in found:
        assert all(a.equal(b) for a, b in zip(outputs, want, strict=True))


@pytest.mark.cuda
def test_it_waits_until_a_neighbour_has_left():
    from kernels.neighbour import hold

    w = weight(2048, 8192).cuda()
    want = poison(*w.shape).cuda(), torch.empty(1, 1, device="cuda")
    torch.ops.olq.quantize_fp8_(w, *want, 0, 0, False, *PLAIN)
    taken = torch.zeros(tiles.TOGETHER // 2, dtype=torch.int64, device="cuda")
    hold[(len(taken),)](taken, 1, num_warps=32)  # compiled here, not while the clock runs
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    found = [(poison(*w.shape).cuda(), torch.empty(1, 1, device="cuda")) for _ in range(3)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(other):
        hold[(len(taken),)](taken, 20_000_000, num_warps=32)  # 1024 threads of half of the multiprocessors
    start.record()
    for outputs in found:
        torch.ops.olq.quantize_fp8_(w, *outputs, 0, 0, False, *PLAIN)
    end.record()
    torch.cuda.synchronize()
    assert taken.min() >= 20_000_000
    assert start.elapsed_time(end) > 15, "the neighbour was in nobody's way"
    for outputs in found:
        assert all(a.equal(b) for a, b in zip(outputs, want, strict=True))


@pytest.mark.cuda
def test_a_graph_holds_it():
    w = weight(2048, 8192, seed=1).cuda()
    found = poison(*w.shape).cuda(), torch.empty(1, 1, device="cuda")
    assert kernels.path("quantize_fp8_", w, *found, 0, 0, False, *PLAIN).kernels == ONCE
    torch.ops.olq.quantize_fp8_(w, *found, 0, 0, False, *PLAIN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.olq.quantize_fp8_(w, *found, 0, 0, False, *PLAIN)
    for factor in (2.0, 3.0):
        w.mul_(factor)
        found[0].fill_(0xA5)
        graph.replay()
        assert all(a.cpu().equal(b) for a, b in zip(found, reference(w.cpu()), strict=True))


def names(w: Tensor, codes: Tensor | None = None, device: str = "cuda", **reading: object) -> tuple[str, ...]:
    operator, (_, other, *rest) = fp8_call(w[..., :1, :1] if w.is_meta else w, (0, 0), **reading)
    found = plans.plan(operator, (w, other if codes is None else codes, *rest))
    assert isinstance(found, Plan)
    assert tuple(one.kernel for one in found.launches) == SWEEPS  # what a batch launches, and other devices
    return tuple(
        one.kernel for one in launching.suited(found, torch.device(device), launching._allowed).launches
    )


def test_which_matrices_it_is_for(monkeypatch):
    monkeypatch.setattr(launching, "_together", lambda device: tiles.TOGETHER)
    w = torch.zeros(LEAST // 4096 + 1, 4096, dtype=torch.bfloat16)
    assert names(w) == names(w.half()) == names(w[1:]) == ONCE
    assert names(w, saturate=False, through=torch.bfloat16) == ONCE
    largest = torch.empty(LARGEST // 4096, 4096, dtype=w.dtype, device="meta")
    assert names(largest, torch.empty_like(largest, dtype=torch.uint8)) == ONCE
    wider = torch.zeros(len(w), 4112, dtype=torch.uint8)
    others = {
        "smaller": names(w[2:]),
        "float32": names(w.float()),
        "rounded": names(w, through=torch.float16),
        "saturated": names(w, saturate=True),
        "rows apart": names(torch.zeros(len(w), 4112, dtype=w.dtype)[:, :4096]),
        "codes apart": names(w, wider[:, :4096]),
        "source not aligned": names(torch.zeros(w.numel() + 1, dtype=w.dtype)[1:].view(w.shape)),
        "codes not aligned": names(w, torch.zeros(w.numel() + 8, dtype=torch.uint8)[8:].view(w.shape)),
        "an odd number": names(torch.zeros(3, LEAST // 3 + 1 | 1, dtype=w.dtype)),
        "larger": names(
            torch.empty(LARGEST // 4096 + 1, 4096, dtype=w.dtype, device="meta"),
            torch.empty(LARGEST // 4096 + 1, 4096, dtype=torch.uint8, device="meta"),
        ),
        "experts": names(torch.zeros(2, *w.shape, dtype=w.dtype)),
    }
    assert others == dict.fromkeys(others, SWEEPS)


def test_who_may_wait_for_each_other(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=142)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for early, programs in ((True, 142), (False, 0)):  # compute capability 8.9 has not all instructions
        monkeypatch.setattr(launching, "_early", lambda device, early=early: early)
        assert launching._together.__wrapped__(torch.device("cuda")) == programs
    assert launching._together.__wrapped__(torch.device("cpu")) == 1


def test_it_can_be_forbidden(monkeypatch):
    monkeypatch.setattr(launching, "_together", lambda device: tiles.TOGETHER)
    w = torch.zeros(LEAST // 4096, 4096, dtype=torch.bfloat16)
    args = fp8_call(w, (0, 0))[1]

    def signature() -> tuple[object, ...]:
        return launching._signature("quantize_fp8_", args, launching._allowed)[0]

    before = signature()
    try:
        kernels.allow_together(False)
        assert signature() != before  # what was launched before is not replayed
        assert names(w) == SWEEPS
    finally:
        kernels.allow_together(True)
    assert signature() == before
    assert names(w) == ONCE


def test_what_is_forbidden_while_it_is_compiled_is_not_replayed(monkeypatch):
    args = fp8_call(torch.zeros(LEAST // 4096, 4096, dtype=torch.bfloat16), (0, 0))[1]
    kept: dict[object, object] = {}
    monkeypatch.setattr(launching, "_READY", kept)
    monkeypatch.setattr(launching, "_known", lambda: True)
    monkeypatch.setattr(launching, "_Ready", lambda kernel, one: one)
    monkeypatch.setattr(launching, "_compiled", lambda *args: kernels.allow_together(False))
    plan = replace(planned(args[0]), scratch=0)
    try:
        launching._first("quantize_fp8_", plan, args, (), torch.device("cuda", 0), True)
    finally:
        kernels.allow_together(True)
    assert list(kept.values()) == [(0, 0, plan.launches)]
    assert launching._signature("quantize_fp8_", args, True)[0] in kept
    assert launching._signature("quantize_fp8_", args, False)[0] not in kept


def test_a_device_that_cannot_run_all_programs_sweeps_twice(monkeypatch):
    w = torch.zeros(LEAST // 4096, 4096, dtype=torch.bfloat16)
    for programs, expected in ((tiles.TOGETHER, ONCE), (tiles.TOGETHER - 1, SWEEPS), (0, SWEEPS)):
        monkeypatch.setattr(launching, "_together", lambda device, programs=programs: programs)
        assert names(w) == expected
        monkeypatch.setattr(kernels, "unavailable", lambda args: None)
        assert kernels.path("quantize_fp8_", *fp8_call(w, (0, 0))[1]).kernels == expected


def test_its_programs_are_launched_together(monkeypatch):
    pytest.importorskip("triton", reason="needs triton: install the extra `triton`")
    for name in ("_hardware", "_early"):
        monkeypatch.setattr(launching, name, lambda device: True)
    for one in planned(torch.zeros(LEAST // 4096, 4096, dtype=torch.bfloat16)).launches:
        settings = launching.settings(one, torch.device("cuda"))
        assert settings.get("launch_cooperative_grid", False) == one.together == (one.kernel == ONCE[1])
        assert one.waits == ("launch_pdl" in settings)
