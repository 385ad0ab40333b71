"""The benchmark refuses to time wrong bytes, does without its peers, and says so."""

import dataclasses
import os

import pytest
import torch

from benchmarks import quantize_cpu
from benchmarks.quantize_cases import CASES, Case

TINY = {"tiny": (64, 128)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(quantize_cpu, "SHAPES", TINY)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def without_peer() -> object:
    raise ImportError("not installed")


def cases(monkeypatch, **changes: object) -> list[Case]:
    changed = [dataclasses.replace(case, **changes) for case in CASES]
    monkeypatch.setattr(quantize_cpu, "CASES", changed)
    return changed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_operator_equals_the_formula(case):
    assert quantize_cpu.check(case, quantize_cpu.weight((65, 96))) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_byte_is_found(case):
    def spoiled(w, codes, *scales):
        case.run(w, codes, *scales)
        codes[3, 5] ^= 1

    at = 3 * (64 if case.name == "nvfp4" else 128) + 5
    found = quantize_cpu.check(dataclasses.replace(case, run=spoiled), quantize_cpu.weight((64, 128)))
    assert found is not None
    assert f"output 0: 1 of {64 * (64 if case.name == 'nvfp4' else 128)} bytes, first at {at}" in found


def test_what_is_red_is_not_timed(monkeypatch, capsys):
    cases(monkeypatch, run=lambda w, *outputs: None, load_peer=without_peer)
    assert quantize_cpu.main(["--rounds", "1"]) == quantize_cpu.BYTES_DIFFER == 1
    printed = capsys.readouterr().out
    assert printed.count("NOT TIMED, its bytes differ from the formula: output 0") == len(CASES)
    assert "/olq" in printed


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--require-peers"], 4)])
def test_a_missing_peer_is_named_and_fails_only_when_asked(monkeypatch, capsys, arguments, status):
    cases(monkeypatch, load_peer=without_peer)
    assert quantize_cpu.main(["--rounds", "1", "--case", "mxfp8", *arguments]) == status
    printed = capsys.readouterr().out
    assert "no peer: torchao to_mx(RCEIL): not installed. Install the extra `bench` for it." in printed
    assert "mxfp8            tiny" in printed


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--check"], 3)])
def test_a_missed_target_is_named_and_fails_only_when_asked(monkeypatch, capsys, arguments, status):
    cases(monkeypatch, load_peer=lambda: lambda w: None, target=1e9)
    assert quantize_cpu.main(["--rounds", "3", "--case", "nvfp4", *arguments]) == status
    assert "target missed: nvfp4: 0" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(
    ("shares", "counted", "set_aside", "busy"),
    [
        ([0.0, 0.9, 0.1, 0.5, 0.0], 3, 2, False),
        ([0.9] * 9, 9, 0, True),
        ([0.9] * 7 + [0.0] * 2, 9, 0, True),
    ],
)
def test_rounds_in_which_others_ran_are_set_aside_whatever_they_gave(
    monkeypatch, shares, counted, set_aside, busy
):
    left = iter(shares)
    monkeypatch.setattr(quantize_cpu, "taken", lambda before, after: next(left))
    result = quantize_cpu.measure(CASES[0], quantize_cpu.weight((8, 64)), lambda w: None, rounds=3)
    assert {name: len(times) for name, times in result.times.items()} == dict.fromkeys(
        ("olq", "copy", "peer"), counted
    )
    assert (result.set_aside, result.busy, next(left, None)) == (set_aside, busy, None)
    assert quantize_cpu.line("8x64", result).endswith("BUSY" if busy else "  2")


def test_what_others_had_is_what_this_program_had_not():
    assert quantize_cpu.taken((1.0, 10.0, 4.0), (2.0, 11.5, 5.0)) == 0.5 / (os.cpu_count() or 1)
    wall, everybody, own = quantize_cpu.processors()
    assert wall > 0
    assert everybody > own > 0
