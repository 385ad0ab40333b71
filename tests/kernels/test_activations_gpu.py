"""Operators for activations on a GPU: graphs, compiled functions, no waiting, no memory beside the outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.compare import FLOATS, bit_patterns, weight
from kernels.test_activations import assert_every_call, assert_new, calls, halves, storage
from torch import Tensor

from numerics import cases
from numerics.cases import OPS, largest_of_their_blocks, ordinary_elements
from olq import activations, alloc, kernels
from olq.kernels import launching

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.unaudited(
        reason="what is made for a replay does not pass the audit's eyes; storages are compared"
    ),
]


def on_gpu(args):
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("values", [largest_of_their_blocks, ordinary_elements])
def test_every_finite_bfloat16(values):
    x = values(32)
    assert_every_call(x, "cuda", 32)
    assert_every_call(x, "cuda", 1)


@settings(deadline=None)
@given(x=cases.weights(5, 96), group=st.sampled_from([16, 32, 48, 128]), finite=st.booleans())
def test_drawn_bit_patterns(x, group, finite):
    x = x.clone()
    if not finite:
        x[1, 3], x[2, 40], x[3, 70] = torch.nan, torch.inf, -torch.inf
    assert_every_call(x, "cuda", group)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 8192), (16, 4096), (129, 1000), (300, 513), (3, 100, 300)], ids=str)
def test_shapes(shape, dtype):
    assert_every_call(weight(*shape, dtype=dtype), "cuda")
    assert_every_call(bit_patterns(max(shape[0], 3), 200, dtype=dtype, finite=False), "cuda")


def test_conversions_by_integers_give_the_same_bytes(monkeypatch):
    # What GPUs before compute capability 8.9 run.
    monkeypatch.setattr(launching, "_hardware", lambda device: False)
    launching._READY.clear()
    launching._NEW.clear()
    try:
        for dtype in FLOATS:
            assert_every_call(bit_patterns(64, 256, dtype=dtype, finite=False), "cuda")
    finally:
        launching._READY.clear()
        launching._NEW.clear()


@pytest.mark.parametrize("through", [None, torch.bfloat16, torch.float16], ids=str)
def test_the_gated_product_of_float32(through):
    even = torch.linspace(-95, 95, 1 << 20)
    near = torch.linspace(-1e-5, 1e-5, 1 << 18)  # divisors of the sigmoid a few units from 2
    every = torch.randint(-(1 << 31), 1 << 31, (3 << 18,), dtype=torch.int32).view(torch.float32)
    gate = torch.cat((even, near, every)).view(256, -1)
    up = torch.ones_like(gate)
    up[::2] = bit_patterns(128, gate.shape[1], dtype=torch.float32)
    for form in ((None, 1.0, 0.0), (7.0, 1.702, 1.0)):
        assert_new("silu_mul_quantize_fp8", (gate, up, "row_major", 1, False, *form, through), "cuda")


def test_a_second_call_is_made_and_launched_without_tritons_front(monkeypatch):
    every = [(operator, on_gpu(args)) for operator, args in calls(weight(37, 300))]
    before = [getattr(OPS, operator)(*args) for operator, args in every]
    if not launching._known():
        pytest.skip("launches of this Triton release go through its front")

    def refuse(name):
        raise AssertionError(f"{name} went through Triton's front")

    monkeypatch.setattr(launching, "_kernel", refuse)
    for (operator, args), first in zip(every, before, strict=True):
        for a, b in zip(first, getattr(OPS, operator)(*args), strict=True):
            assert a.data_ptr() != b.data_ptr()
            assert storage(a).equal(storage(b))
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert b._base is None


def test_an_audit_sees_what_is_made():
    for operator, args in calls(weight(37, 300)):
        args = on_gpu(args)
        getattr(OPS, operator)(*args)
        with alloc.audit() as audit:
            outputs = getattr(OPS, operator)(*args)
            watched = {watch.address for watch in audit.watches}
            assert {output.data_ptr() for output in outputs} == watched, operator


def test_outputs_are_no_inference_tensors():
    x = weight(16, 256).cuda()
    for _ in range(2):
        with torch.inference_mode():
            outputs = OPS.quantize_fp8_group(x, "ue8m0_words")
        assert not any(t.is_inference() for t in outputs)


def test_a_graph_quantizes_new_values():
    for operator, args in calls(weight(130, 512)):
        args = on_gpu(args)
        getattr(OPS, operator)(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = getattr(OPS, operator)(*args)
        args[0].copy_(weight(130, 512, seed=1))
        graph.replay()
        for got, want in zip(outputs, getattr(OPS, operator)(*args), strict=True):
            assert storage(got).cpu().equal(storage(want).cpu()), operator


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("layout", ["ue8m0_words", "mn_major"])
def test_compiled_functions_take_kernels(layout):
    def run(x, gate_up):
        a = activations.quantize_mxfp8(x + 1, scale_layout="swizzled_128x4")
        b = activations.silu_mul_quantize_fp8(gate_up * 2, scale_layout=layout)
        return (*a, *b)

    x = weight(130, 512).cuda()
    compiled = torch.compile(run, fullgraph=True)
    for _ in range(2):
        for got, want in zip(compiled(x, x), run(x, x), strict=True):
            assert (got.shape, got.stride()) == (want.shape, want.stride())
            assert got.equal(want)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
def test_no_call_waits_for_the_gpu():
    every = [(operator, on_gpu(args)) for operator, args in calls(weight(130, 512))]
    for operator, args in every:
        getattr(OPS, operator)(*args)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for operator, args in every:
            outputs = getattr(OPS, operator)(*args)
            assert kernels.launch(operator, args, outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_memory_beside_the_outputs():
    for operator, args in calls(weight(1024, 2048)):
        args = on_gpu(args)
        getattr(OPS, operator)(*args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        outputs = getattr(OPS, operator)(*args)
        made = sum(-(-storage(t).numel() // 512) * 512 for t in outputs)
        assert torch.cuda.max_memory_allocated() - before <= made + 512, operator


def test_another_alignment_is_another_launch():
    x = weight(64, 512).cuda()
    for shift in (0, 1, 2, 8, 1):
        view = x.flatten()[shift : shift + 63 * 512].view(63, 512)
        for operator, args in calls(view):
            if operator == "quantize_fp8_group":
                for got, want in zip(
                    getattr(OPS, operator)(*args), getattr(OPS, operator)(view.cpu(), *args[1:]), strict=True
                ):
                    assert storage(got).cpu().equal(storage(want))


def test_more_than_two_gibi_elements():
    rows, columns = 131_200, 16_384
    if torch.cuda.mem_get_info()[0] < 6 * rows * columns:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-4:] = weight(4, columns, seed=3).cuda()
    tail = x[-4:].cpu()
    for operator, rest in (("quantize_fp8_group", ("mn_major",)), ("quantize_mxfp8", ("linear",))):
        for got, want in zip(
            getattr(OPS, operator)(x, *rest), getattr(OPS, operator)(tail, *rest), strict=True
        ):
            assert got[-4:].cpu().equal(want), operator
    codes, words = OPS.silu_mul_quantize_fp8(*halves(x))
    want = OPS.silu_mul_quantize_fp8(*halves(tail))
    assert codes[-4:].cpu().equal(want[0])
    assert words[-4:].cpu().equal(want[1])
