"""Kernel-owned memory on a GPU: the audit sees what Triton and torch write, on any stream, and padding is there.

The Triton tests also run on CPU tensors under TRITON_INTERPRET=1, where Triton is installed.
"""

import os

import pytest
import torch
from torch import Tensor

from olq import alloc
from olq.alloc import TensorSpec, allocate, audit, run_audited
from olq.errors import CoverageError
from olq.layout import MNMajor, Swizzle128x4, UE8M0Words
from olq.numerics.packing import to_mn_major, to_ue8m0_words
from olq.numerics.swizzle import swizzle_128x4, unswizzle_128x4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


def quantize(device: str, rows: int, written: int) -> Tensor:
    pytest.importorskip("triton", reason="needs Triton")
    from alloc_kernels import copy_rows

    x = torch.arange(rows * 40, device=device).remainder(251).to(torch.uint8).view(rows, 40)
    codes = allocate(TensorSpec((rows, 40), torch.uint8), device=device, owner="triton, codes")
    copy_rows(x, codes, written)
    return codes


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_what_triton_wrote_counts_and_what_it_left_out_is_found(device):
    assert run_audited(lambda: quantize(device, 50, 50))[49, 39] == (50 * 40 - 1) % 251
    with pytest.raises(
        CoverageError, match=r"triton, codes, uint8 \[50, 40\]: 80 of 2000 .* at \[48:50, 0:40\]"
    ):
        run_audited(lambda: quantize(device, 50, 48))
    with audit(strict=False) as one:
        kept = quantize(device, 50, 48)
    assert kept.shape == (50, 40)
    assert {(row, column) for row in (48, 49) for column in range(40)} <= set(one.findings[0].coordinates)


@pytest.mark.cuda
def test_padding_on_a_gpu_is_that_of_the_cpu():
    linear = torch.randint(0, 255, (200, 7), dtype=torch.uint8)
    assert torch.equal(swizzle_128x4(linear.cuda()).cpu(), swizzle_128x4(linear))
    assert torch.equal(unswizzle_128x4(swizzle_128x4(linear.cuda()), 200, 7).cpu(), linear)
    scale = torch.ldexp(torch.ones(7, 9), torch.arange(9))
    for move in (to_mn_major, to_ue8m0_words):
        there, here = move(scale.cuda()), move(scale)
        assert there.stride() == here.stride()
        whole = [
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            for t in (there, here)
        ]
        assert torch.equal(whole[0][: len(whole[1])].cpu(), whole[1])


@pytest.mark.cuda
def test_an_audit_on_a_gpu_blames_what_was_not_written_and_nothing_else():
    orders = [
        (Swizzle128x4(70, 5), torch.uint8),
        (MNMajor(70, 5), torch.float32),
        (UE8M0Words(70, 8), torch.int32),
    ]
    for order, dtype in orders:
        spec = TensorSpec.of(order, dtype)

        def whole(spec: TensorSpec = spec) -> Tensor:
            t = allocate(spec, device="cuda", owner="whole")
            flat = alloc.memory.storage_elements(t, spec)
            flat.copy_(torch.arange(len(flat), device="cuda"))
            alloc.write_padding_(t, spec)
            return t

        def nothing(spec: TensorSpec = spec) -> Tensor:
            return allocate(spec, device="cuda", owner="nothing")

        run_audited(whole)
        with pytest.raises(CoverageError, match="nothing"):
            run_audited(nothing)


@pytest.mark.cuda
def test_a_producer_on_another_stream_is_waited_for():
    side = torch.cuda.Stream()
    with audit():
        t = allocate(TensorSpec((1 << 22,), torch.uint8), device="cuda", owner="side stream")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            t.fill_(1)
        t.record_stream(side)


@pytest.mark.cuda
def test_padding_and_audit_need_no_large_scratch_on_a_gpu():
    spec = TensorSpec((64 << 20,), torch.uint8)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with audit():
        allocate(spec, device="cuda", owner="big").fill_(3)
        assert torch.cuda.max_memory_allocated() - before <= spec.nbytes + (8 << 20)
