"""Kernels on a GPU: every bfloat16 value, drawn bit patterns, ragged shapes, graphs, memory, no waiting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.compare import (
    FLOATS,
    all_calls,
    assert_all,
    assert_equal,
    bit_patterns,
    fp8_call,
    mxfp8_call,
    nvfp4_call,
    nvfp4_scale_call,
    weight,
)
from torch import Tensor

from numerics.cases import (
    OPS,
    RULES,
    first_difference,
    largest_of_their_blocks,
    ordinary_elements,
    poison,
    weights,
)
from olq import kernels
from olq.kernels import launching

pytestmark = pytest.mark.cuda
BLOCKS = ((1, 0), (0, 0), (128, 128), (1, 128))


def on_gpu(args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)


@pytest.mark.parametrize("values", [largest_of_their_blocks, ordinary_elements])
def test_every_finite_bfloat16(values):
    w = values(32)
    assert_all(w, "cuda", ((1, 0), (1, 16)), RULES)
    assert_equal(*nvfp4_call(w, 0.013), "cuda")


@settings(deadline=None)
@given(
    w=weights(5, 96),
    finite=st.booleans(),
    through=st.sampled_from([None, *FLOATS[:2]]),
    saturate=st.booleans(),
)
def test_drawn_bit_patterns(w, finite, through, saturate):
    w = w.clone()
    if not finite:
        w[1, 3], w[2, 40], w[3, 70] = torch.nan, torch.inf, -torch.inf
    assert_all(w, "cuda", ((1, 0), (0, 0), (1, 32)), through=through, saturate=saturate)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (127, 130), (129, 257), (300, 1000), (3, 100, 300), (5, 4096)], ids=str
)
def test_ragged_shapes(shape, dtype):
    assert_all(weight(*shape, dtype=dtype), "cuda", BLOCKS)
    assert_all(bit_patterns(max(shape[0], 3), 64, dtype=dtype, finite=False), "cuda", BLOCKS)


SOURCES = {
    "transposed": lambda: weight(300, 200).t(),
    "a region": lambda: weight(300, 700)[3:200, 17:400],
    "an aligned region": lambda: weight(300, 1024)[128:256, 512:768],
    "steps": lambda: weight(300, 700)[::3, 1:600:2],
    "expanded": lambda: weight(1, 256).expand(64, 256),
    "experts": lambda: weight(4, 100, 512)[::2],
    "experts, transposed": lambda: weight(3, 200, 100).transpose(1, 2),
    "long rows": lambda: weight(3, 70_000),
}


@pytest.mark.parametrize("name", SOURCES)
def test_any_strides(name):
    assert_all(SOURCES[name](), "cuda", BLOCKS)


def test_more_than_two_gibi_elements():
    rows, columns = 131_200, 16_384
    if torch.cuda.mem_get_info()[0] < 4 * rows * columns:
        pytest.skip("needs 8 GiB of free GPU memory")
    w = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    w[-2:] = weight(2, columns, seed=3).cuda()
    tail = w[-130:].cpu()
    calls = [
        fp8_call(tail, (1, 0)),
        fp8_call(tail[-128:], (128, 128)),
        mxfp8_call(tail),
        nvfp4_call(tail, 1e-3),
    ]
    for operator, (part, codes, scale, *rest) in calls:
        height = part.shape[0]
        large = torch.empty(rows, codes.shape[1], dtype=torch.uint8, device="cuda")
        down = rows * scale.shape[0] // height
        scales = torch.empty(down, scale.shape[1], dtype=scale.dtype, device="cuda")
        getattr(OPS, operator)(w, large, scales, *on_gpu(tuple(rest)))
        getattr(OPS, operator)(part, codes, scale, *rest)
        assert large[-height:].cpu().equal(codes), operator
        assert scales[-scale.shape[0] :].cpu().equal(scale), operator
    _, (_, scale_2, *_) = nvfp4_scale_call(tail)
    whole = scale_2.cuda()
    OPS.nvfp4_tensor_scale_(tail, scale_2)
    OPS.nvfp4_tensor_scale_(w, whole)
    assert whole.cpu().equal(scale_2)


def calls_on_gpu(w: Tensor):
    return [(operator, on_gpu(args)) for operator, args in all_calls(w, BLOCKS, RULES)]


def test_every_call_takes_kernels():
    for operator, args in calls_on_gpu(weight(300, 512)):
        assert kernels.path(operator, *args).kernels, kernels.path(operator, *args)


def test_a_second_call_is_replayed_for_new_addresses():
    for operator, args in all_calls(weight(64, 256), BLOCKS, RULES):
        assert kernels.launch(operator, on_gpu(args))
        others = (weight(64, 256, seed=1), *(a.clone() if isinstance(a, Tensor) else a for a in args[1:]))
        replayed = on_gpu(others)
        assert kernels.replay(operator, replayed), operator
        getattr(OPS, operator)(*others)
        for got, want in zip(replayed[1:], others[1:], strict=True):
            if isinstance(want, Tensor):
                assert first_difference(got, want) is None, operator


def test_a_replay_is_only_for_the_same_signature():
    operator, args = fp8_call(weight(64, 256), (1, 0))
    args = on_gpu(args)
    launching._READY.clear()
    assert kernels.launch(operator, args)
    w, codes, scale, *rest = args
    for other in (
        (w.half(), codes, scale, *rest),
        (w[:, :128], codes[:, :128], scale, *rest),
        (w, codes, scale, *rest[:2], True, *rest[3:]),
        (w, codes, scale, *rest[:-1], True),
        (w.cpu(), codes, scale, *rest),
    ):
        assert kernels.replay(operator, args)
        assert not kernels.replay(operator, other)


def test_another_alignment_is_another_launch():
    memory = weight(1, 64 * 257)[0].cuda()
    for shift in (0, 1, 2, 8, 1):
        w = memory[shift : shift + 64 * 256].view(64, 256)
        args = (w, poison(64, 256).cuda(), torch.empty(64, 1, device="cuda"), 1, 0, False)
        OPS.quantize_fp8_(*args)
        codes, scale = poison(64, 256), torch.empty(64, 1)
        OPS.quantize_fp8_(w.cpu(), codes, scale, 1, 0, False)
        assert args[1].cpu().equal(codes)
        assert args[2].cpu().equal(scale)


def test_a_graph_quantizes_new_values():
    for operator, args in calls_on_gpu(weight(300, 512)):
        getattr(OPS, operator)(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            getattr(OPS, operator)(*args)
        args[0].copy_(weight(300, 512, seed=1))
        graph.replay()
        got = [a.clone() for a in args[1:] if isinstance(a, Tensor)]
        getattr(OPS, operator)(*args)
        for g, a in zip(got, args[1:], strict=False):
            assert g.equal(a), operator


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
def test_no_call_waits_for_the_gpu():
    calls = calls_on_gpu(weight(300, 512))
    for operator, args in calls:
        getattr(OPS, operator)(*args)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for operator, args in calls:
            getattr(OPS, operator)(*args)
            assert kernels.launch(operator, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_memory_beyond_a_few_kilobytes():
    for operator, args in calls_on_gpu(weight(2048, 2048)):
        getattr(OPS, operator)(*args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        getattr(OPS, operator)(*args)
        assert torch.cuda.max_memory_allocated() - before <= 8192, operator


def test_what_has_no_kernel_still_gives_the_references_bytes():
    w = weight(300, 640)
    operator, args = fp8_call(w, (0, 128))
    assert kernels.path(operator, *on_gpu(args)).reason.startswith("a unit of 300 x 128")
    gpu = on_gpu(args)
    getattr(OPS, operator)(*gpu)
    getattr(OPS, operator)(*args)
    assert gpu[1].cpu().equal(args[1])


def test_conversions_by_integers_give_the_same_bytes(monkeypatch):
    # What GPUs before compute capability 8.9 run.
    monkeypatch.setattr(launching, "_hardware", lambda device: False)
    launching._READY.clear()
    try:
        for dtype in FLOATS:
            assert_all(bit_patterns(64, 256, dtype=dtype, finite=False), "cuda", BLOCKS)
    finally:
        launching._READY.clear()


def test_launches_that_overlap_see_what_the_one_in_front_wrote():
    calls, got = [], []
    for seed in range(6):
        w = weight(2048, 1536, seed=seed) * 2.0 ** (seed % 3)
        scale_2 = poison(dtype=torch.float32)
        calls += [fp8_call(w, (0, 0)), ("nvfp4_tensor_scale_", (w, scale_2)), nvfp4_call(w, scale_2)]
    # One call's result is the next one's argument: the same tensor on the GPU too.
    moved: dict[int, Tensor] = {}
    for operator, args in calls:
        there = [moved.setdefault(id(a), a.cuda()) if isinstance(a, Tensor) else a for a in args]
        got.append((operator, there))
    for _ in range(5):
        for operator, args in got:
            getattr(OPS, operator)(*args)
    for operator, args in calls:
        getattr(OPS, operator)(*args)
        for a in args:
            if isinstance(a, Tensor):
                assert first_difference(moved[id(a)].cpu(), a) is None, operator


def test_the_magnitude_of_a_large_matrix():
    w = weight(4096, 2048)
    w[4000, 2000] = 3.0e38
    assert_equal(*nvfp4_scale_call(w), "cuda")
    w[17, 3] = torch.nan
    assert_equal(*nvfp4_scale_call(w), "cuda")
