"""The benchmark of products refuses to time wrong bits and says what it missed. Timing itself needs a GPU."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from timing import cold_at_first
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import device_time, linear_gpu, runner
from benchmarks.device_time import Copy
from benchmarks.linear_cases import CASES
from benchmarks.markdown import rows_of

FORMATS = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def weight() -> torch.Tensor:
    return torch.randn(48, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


@FORMATS
def test_products_of_one_hot_rows_equal_the_formula(case):
    assert linear_gpu.check(case, case.quantize(weight())) is None


@FORMATS
def test_a_wrong_bit_is_found(case):
    def spoiled(*tensors):
        w = case.decode(*tensors)
        w[3] *= 1.01
        return w

    found = linear_gpu.check(dataclasses.replace(case, decode=spoiled), case.quantize(weight()))
    assert found is not None
    assert "products differ, 1 rows of x" in found


def test_without_a_gpu_nothing_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert linear_gpu.main([]) == runner.NO_GPU
    assert capsys.readouterr().out == "no CUDA device: nothing is timed\n"


def test_the_fastest_copies_of_all_rows_are_the_limit():
    copy = Copy(torch.empty(1 << 20, dtype=torch.bfloat16))
    moved = 4 * (1 << 20)  # bytes, read and written
    for times, median, fastest in (([2.0, 1.0, 9.0], 2.0, 2.0), ([0.5], 0.5, 0.5), ([4.0], 4.0, 0.5)):
        assert copy.seen(times) == moved / median / 1e9
        assert copy.milliseconds(moved) == fastest


def test_a_graph_has_all_calls_until_there_are_enough(monkeypatch):
    order = []
    graph = SimpleNamespace(replay=object())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("captured:"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda captured: nullcontext())
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    for least, count in ((1, 2), (2, 2), (3, 4)):
        assert device_time.repeated(calls, least) == (graph.replay, count)
        every = ["a", "b"] * (count // 2)
        assert order == [*every, "captured:", *every]
        order.clear()


def test_so_many_runs_lie_between_two_events(monkeypatch):
    order = []
    event = SimpleNamespace(
        record=lambda: order.append("event"), synchronize=lambda: None, elapsed_time=lambda end: 12.0
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    assert device_time.milliseconds(lambda: order.append("run"), 3) == 4.0
    assert order == ["event", "run", "run", "run", "event"]


def test_runs_take_turns_and_nothing_follows_what_a_copy_left(monkeypatch):
    order, copy = [], Copy(torch.arange(1 << 10).bfloat16())
    took = {"a": 6.0, "b": 8.0, "copy": 5.0}

    def measured(run):
        name = "copy" if run == copy.run else run
        order.append(name)
        return took[name] + len(order)

    settle = copy.settle
    monkeypatch.setattr(copy, "settle", lambda: order.append("settle") or settle())
    monkeypatch.setattr(device_time, "milliseconds", measured)
    times = device_time.in_turns({"a": ("a", 2), "b": ("b", 4)}, copy, 2, untimed=1)
    rounds = [["b", "copy", "settle", "a"], ["copy", "settle", "a", "b"], ["a", "b", "copy", "settle"]]
    assert order == [name for some in rounds for name in some]
    # Of the second round and the third: each stand-in's time, and how much came before it.
    assert times == {
        "a": [(6 + 7) / 2, (6 + 9) / 2],
        "b": [(8 + 8) / 4, (8 + 10) / 4],
        "copy": [5 + 5, 5 + 11],
    }


class Reduced(TorchDispatchMode):
    """The largest tensors that `amax` was given, in elements."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.amax:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_so_much_is_read_after_a_copy_that_a_cache_loses_it(monkeypatch):
    assert device_time.CACHE >= 2 * (126 << 20)
    monkeypatch.setattr(device_time, "CACHE", 1 << 10)
    with Reduced() as reduced:
        Copy(torch.zeros(64, 64, dtype=torch.bfloat16)).settle()
        Copy(torch.zeros(100, dtype=torch.bfloat16)).settle()  # all there is
    assert reduced.sizes == [512, 100]


def test_a_row_has_times_of_one_call_and_the_share_of_all_rows_copies(monkeypatch):
    copy = Copy(torch.empty(1 << 28, dtype=torch.bfloat16))
    names, took = iter(("olq", "linear")), {"olq": 6.0, "linear": 9.0}  # of three calls
    monkeypatch.setattr(linear_gpu, "SHAPE", (48, 256))
    monkeypatch.setattr(linear_gpu, "repeated", lambda calls, least: (next(names), 3))
    monkeypatch.setattr(device_time, "milliseconds", cold_at_first(3, lambda run: took.get(run, 0.5)))
    monkeypatch.setattr(runner, "warm_up", lambda: None)
    case = next(case for case in CASES if case.name == "mxfp8")
    row, olq, size = linear_gpu.measure(case, [case.quantize(weight())], [weight()], copy, 16, 2)
    assert (row["us"], row["linear_us"], row["speed"], olq) == (2000.0, 3000.0, 1.5, 2.0)
    assert row["copy_terabytes_a_second"] == (1 << 30) / 0.5 / 1e9
    assert size == 48 * 256 + 48 * 8
    copy.seen([0.25])  # a later row's
    rate = (1 << 30) / 0.25
    assert linear_gpu.share(olq, size, copy) == {
        "fastest_terabytes_a_second": rate / 1e9,
        "share": size / rate / 2.0,
    }


def test_rows_are_kept_when_the_copies_of_all_have_been_seen(monkeypatch, tmp_path, capsys):
    copy, randn = Copy(torch.empty(1 << 28, dtype=torch.bfloat16)), torch.randn
    times = iter([0.5, 0.25, 1.0])  # of copies, a row each

    def measure(case, weights, plain, copy, m, rounds):
        copy.seen([next(times)])
        row = {"rows_of_x": m, "us": 1.0, "linear_us": 2.0, "speed": 2.0, "path": "", "speed_target": None}
        return {**row, "share_target": 0.75}, 0.001, 1 << 20

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "randn", lambda *shape, device=None, **rest: randn(*shape, **rest))
    monkeypatch.setattr(runner, "environment", lambda: {"gpu": "none"})
    for name, value in (
        ("copy_of_a_gibibyte", lambda: copy),
        ("SHAPE", (256, 256)),
        ("ROWS_OF_X", (1, 8, 16)),
        ("measure", measure),
    ):
        monkeypatch.setattr(linear_gpu, name, value)
    monkeypatch.setattr(linear_gpu, "copies", lambda tensors: [tensors])
    results = tmp_path / "rows.jsonl"
    assert linear_gpu.main(["--case", "mxfp8", "--results", str(results), "--check"]) == runner.MISSED
    rows = rows_of(results)
    assert [(row["case"], row["rows_of_x"], row["gpu"]) for row in rows] == [
        ("mxfp8", m, "none") for m in (1, 8, 16)
    ]
    fastest = (1 << 30) / 0.25
    assert {row["fastest_terabytes_a_second"] for row in rows} == {fastest / 1e9}
    assert {row["share"] for row in rows} == {(1 << 20) / fastest / 0.001}
    out = capsys.readouterr().out
    assert out.count("target missed: mxfp8, ") == 3
    assert "0.24 of the limit, 2.00x a bfloat16 linear (2.0 us)" in out


def test_missed_targets_are_named():
    row = {
        "case": "mxfp8",
        "rows_of_x": 1,
        "share": 0.5,
        "share_target": 0.75,
        "speed": 1.5,
        "speed_target": None,
    }
    assert linear_gpu.missed(row) == ["mxfp8, 1 rows of x: share 0.50, target 0.75"]
    assert linear_gpu.missed(row | {"share": 0.8}) == []


@pytest.mark.cuda
def test_rows_are_printed_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(linear_gpu, "SHAPE", (512, 512))
    monkeypatch.setattr(linear_gpu, "ROWS_OF_X", (1, 40))
    monkeypatch.setattr(linear_gpu, "_CACHE", 1 << 20)
    results = tmp_path / "results.jsonl"
    assert linear_gpu.main(["--case", "mxfp8", "--rounds", "2", "--results", str(results)]) == 0
    assert len(results.read_text().splitlines()) == 2
    assert "of the limit" in capsys.readouterr().out
