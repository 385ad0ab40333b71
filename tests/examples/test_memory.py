"""The allocator's events tell what a call took: scratch, peaks that are gone again, and when."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from olq.testing.memory import measure_memory

MIB = 1 << 20


def bytes_of(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def test_a_call_that_takes_nothing_has_no_peak():
    trace = measure_memory(lambda: 7)
    assert (trace.peak_bytes, trace.final_bytes, trace.result) == (0, 0, 7)
    assert trace.live_bytes == ()
    assert trace.peak_s == 0.0


def test_a_block_that_is_kept_is_peak_and_final():
    trace = measure_memory(lambda: bytes_of(3 * MIB))
    assert trace.peak_bytes == trace.final_bytes == 3 * MIB


def test_a_block_that_is_freed_at_once_is_seen_in_the_peak_only():
    def call():
        bytes_of(5 * MIB)
        return bytes_of(MIB)

    trace = measure_memory(call)
    assert trace.peak_bytes == 5 * MIB
    assert trace.final_bytes == MIB


def test_blocks_that_live_together_add_up():
    def call():
        first = bytes_of(2 * MIB)
        second = bytes_of(3 * MIB)
        del first
        third = bytes_of(MIB)
        return second, third

    trace = measure_memory(call)
    assert trace.live_bytes == (2 * MIB, 5 * MIB, 3 * MIB, 4 * MIB)
    assert trace.peak_bytes == 5 * MIB
    assert trace.final_bytes == 4 * MIB


def test_scratch_inside_one_operator_is_seen():
    x = torch.rand(MIB)
    trace = measure_memory(lambda: torch.quantile(x, 0.5))
    assert trace.peak_bytes >= 4 * MIB, "quantile sorts a copy of its argument that it never returns"
    assert trace.final_bytes < 100


def test_memory_from_before_the_start_does_not_count():
    old = bytes_of(4 * MIB)
    trace = measure_memory(lambda: old.add_(1))
    assert trace.peak_bytes < 100


def test_giving_back_what_is_older_than_the_start_does_not_count():
    """Also if an earlier measurement saw it being taken: a call has the same trace whatever came before."""
    first = measure_memory(lambda: bytes_of(4 * MIB))
    held = [first.result]
    del first

    def call():
        held.clear()
        return bytes_of(MIB)

    assert measure_memory(call).live_bytes == (MIB,)


def test_a_mapped_file_counts_apart(tmp_path):
    save_file({"a": bytes_of(3 * MIB).zero_()}, tmp_path / "x.safetensors")

    def call():
        with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
            return file.get_tensor("a").clone()

    trace = measure_memory(call)
    assert trace.live_bytes == (3 * MIB,)
    assert 3 * MIB < trace.mapped_peak_bytes < 3 * MIB + 4096


def test_marks_say_which_part_ran_when():
    def call():
        with torch.profiler.record_function("one"):
            a = bytes_of(MIB)
        with torch.profiler.record_function("two"):
            b = bytes_of(6 * MIB)
        del b
        return a

    trace = measure_memory(call)
    assert [mark.name for mark in trace.marks] == ["one", "two"]
    one, two = trace.marks
    assert 0 <= one.start_s <= one.end_s <= two.start_s <= trace.peak_s <= two.end_s
    assert trace.live_at(one.end_s) == MIB
    assert trace.live_at(two.end_s) == 7 * MIB
    assert trace.live_at(-1.0) == 0


def test_an_error_passes_through_and_the_next_measurement_works():
    def fail():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        measure_memory(fail)
    assert measure_memory(lambda: bytes_of(MIB)).peak_bytes == MIB


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_freed_block_is_seen():
    def call():
        torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        return torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")

    trace = measure_memory(call, device="cuda")
    assert trace.peak_bytes == 8 * MIB
    assert max(trace.live_bytes) == 8 * MIB
    assert trace.final_bytes == 2 * MIB
