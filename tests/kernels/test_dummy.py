"""The kernel for dummy values writes the bytes of the rule in PyTorch, and nothing else, for any layout and shard.

That rule's own bytes are compared with an oracle in tests/numerics/test_random.py. On a CPU under Triton's interpreter
(see test_interpreter), and on a GPU.
"""

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.compare import DEVICES
from torch import Tensor

from olq import kernels
from olq.kernels import plan_dummy
from olq.numerics.random import UniformFill
from olq.reload.dummy import dummy_init_tensor
from oracles import random as oracle

NAME = "model.layers.0.weight"
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]
BOUNDS = [
    (-1e-3, 1e-3),
    (0.0, 1.0),
    (-0.3, 0.1),
    (5.0, 5.0),
    (0.0, 0.0),
    (100.0, 100.1),
    (-448.0, 448.0),
    (0.0, 1e-40),
]


class Asked:
    """`fill_uniform`, and whether it filled."""

    def __init__(self) -> None:
        self.filled: list[bool] = []

    def __call__(self, *args: object) -> bool:
        self.filled.append(kernels.fill_uniform(*args))  # pyright: ignore[reportArgumentType]
        return self.filled[-1]


def memory_of(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return (
        torch.full((*shape, dtype.itemsize), 0xA5, dtype=torch.uint8, device=device).view(dtype).squeeze(-1)
    )


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8).cpu()


def assert_filled(form, dtype, device, bounds=(-1e-3, 1e-3), shape=None, offset=None, seed=7) -> None:
    """`form` makes (memory, a view of it) on a device: all of the memory is as if the rule in PyTorch had filled it."""
    want, view = form(dtype, "cpu")
    UniformFill(*bounds, seed).fill_(view, NAME, shape, offset)
    memory, out = form(dtype, device)
    asked = Asked()
    UniformFill(*bounds, seed, asked).fill_(out, NAME, shape, offset)
    assert asked.filled == ([True] if out.numel() else [])
    different = (as_bytes(memory) != as_bytes(want)).nonzero().flatten().tolist()
    assert not different, (
        f"{len(different)} bytes of {out.shape}, {out.stride()}; the first is {different[0]}"
    )


def whole(*shape):
    def form(dtype, device):
        memory = memory_of(shape, dtype, device)
        return memory, memory

    return form


def view_of(shape, view):
    def form(dtype, device):
        memory = memory_of(shape, dtype, device)
        return memory, view(memory)

    return form


FORMS = {
    "contiguous": whole(40, 129),
    "a tile": whole(64, 128),
    "one element": whole(1),
    "no dimensions": whole(),
    "transposed": view_of((70, 40), lambda t: t.t()),
    "transposed, odd": view_of((33, 41), lambda t: t.t()),
    "a region": view_of((20, 50), lambda t: t[3:17, 5:46]),
    "a region at the second element": view_of((7, 301), lambda t: t[1:6, 1:300]),
    "steps": view_of((20, 60), lambda t: t[::3, 1::2]),
    "experts, transposed": view_of((3, 20, 18), lambda t: t.transpose(1, 2)),
    "experts, every second": view_of((5, 6, 24), lambda t: t[::2, 1:5]),
    "five dimensions": view_of((4, 4, 3, 4, 6), lambda t: t.permute(4, 0, 3, 2, 1)[1:5, 1:3, ::2, :2]),
}


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_any_layout(name, dtype, device):
    assert_filled(FORMS[name], dtype, device)


@DEVICES
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bounds(bounds, dtype, device):
    assert_filled(whole(9, 70), dtype, device, bounds)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounds", [(-448.0, 448.0), (-1e-6, 3e-5)], ids=str)
def test_every_draw(dtype, bounds, device):
    # 2**18 draws of 2**16: 98 of 100 that there are, subnormals of all types among them.
    assert_filled(whole(1 << 18), dtype, device, bounds)


SHARDS = [
    ((6, 40), (24, 40), (12, 0)),
    ((6, 40), (6, 160), (0, 80)),
    ((6, 37), (6, 111), (0, 37)),
    ((5, 37), (25, 111), (5, 74)),
    ((2, 3, 8), (8, 9, 32), (4, 3, 16)),
]


@DEVICES
@pytest.mark.parametrize(("extents", "shape", "offset"), SHARDS, ids=str)
def test_any_shard(extents, shape, offset, device):
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        assert_filled(whole(*extents), dtype, device, shape=shape, offset=offset)
        mirrored = view_of(extents[::-1], lambda t: t.permute(*reversed(range(t.dim()))))
        assert_filled(mirrored, dtype, device, shape=shape, offset=offset)


@DEVICES
@pytest.mark.parametrize("middle", [2**32, 2**33, 3 * 2**33, 2**62])
def test_indices_beyond_32_bits(middle, device):
    for before in (0, 1, 10, 11):
        assert_filled(whole(20), torch.float32, device, shape=(2**63 - 1,), offset=(middle - before,))
    assert_filled(whole(5, 3), torch.float32, device, shape=(5, 2**32 + 1), offset=(0, 7))


@st.composite
def layouts(draw):
    """A view with gaps, permuted, with where it lies in the unsharded tensor."""
    count = draw(st.integers(1, 4))
    extents, steps = ([draw(st.integers(1, most)) for _ in range(count)] for most in (6, 2))
    order = draw(st.permutations(range(count)))
    before = [draw(st.integers(0, 5)) for _ in range(count)]
    shape = [extents[d] + before[order.index(d)] + draw(st.integers(0, 5)) for d in order]

    def form(dtype, device):
        memory = memory_of(tuple(n * s for n, s in zip(extents, steps, strict=True)), dtype, device)
        return memory, memory[tuple(slice(None, None, s) for s in steps)].permute(order)

    return form, shape, before


@DEVICES
@settings(max_examples=20, deadline=None)
@given(drawn=layouts(), seed=st.integers(), dtype=st.sampled_from(DTYPES))
def test_any_drawn_layout(drawn, seed, dtype, device):
    form, shape, offset = drawn
    assert_filled(form, dtype, device, shape=shape, offset=offset, seed=seed)


@DEVICES
def test_the_bytes_are_those_of_the_page(device):
    out = memory_of((4, 5), torch.bfloat16, device)
    UniformFill(-1e-3, 1e-3, 1234, kernels.fill_uniform).fill_(out, "w", (8, 9), (3, 4))
    want = oracle.box(1234, "w", -1e-3, 1e-3, (4, 5), (8, 9), (3, 4), "bfloat16")
    assert as_bytes(out).numpy().tobytes() == want.tobytes()


@DEVICES
def test_a_type_without_a_kernel_is_filled_by_the_rule_in_pytorch(device):
    asked, out = Asked(), torch.empty(6, dtype=torch.float64, device=device)
    UniformFill(-1.0, 1.0, 1, asked).fill_(out, "w")
    want = torch.empty(6, dtype=torch.float64)
    UniformFill(-1.0, 1.0, 1).fill_(want, "w")
    assert asked.filled == [False]
    assert out.cpu().equal(want)


def test_without_a_gpu_there_is_no_kernel_and_no_box_is_taken(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    boxes = iter([1])
    assert not kernels.fill_uniform(torch.empty(3), (1.0, 0.0, -1.0, 1.0, False), boxes)  # pyright: ignore
    assert next(boxes) == 1


def test_a_launch_covers_its_box():
    dims = [(70_000, 1 << 20, 600), (3, 7, 200), (100, 1, 1)]
    found = list(plan_dummy.launches("bfloat16", (1.0, 0.0, -1.0, 1.0, False), dims, 2, 5, (1, 2)))
    (launch, offset), *more = found
    assert not more
    assert offset == 5
    tiles, *inner = launch.grid
    assert sorted(inner) == [1, 1] or 70_000 not in inner
    assert tiles * launch.constants["ROWS"] * launch.constants["PAIRS"] * math.prod(inner) >= 70_000 * 3 * 50  # pyright: ignore


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_nothing_beside_the_tensor_is_allocated(dtype):
    out = torch.empty(4096, 4096, dtype=dtype, device="cuda")
    for tensor in (out, out.t(), out[:, 3:4001]):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        dummy_init_tensor(tensor, name=NAME)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == before


@pytest.mark.cuda
def test_more_bytes_than_32_bits_count():
    rows, columns = 131_072 + 3, 65_536  # 2**33 elements and more: two pairs of keys
    if torch.cuda.mem_get_info()[0] < 2 * rows * columns:
        pytest.skip("needs 16 GiB of free GPU memory")
    out = torch.full((rows, columns), 0xA5, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    for tensor in (out, out.t()):
        dummy_init_tensor(tensor, name=NAME)
        fill = UniformFill(-1e-3, 1e-3, 1234)
        for row in (0, 3, 32_768, 65_535, 131_071, 131_072, rows - 1):
            part = tensor[:, row] if tensor.stride(0) == 1 else tensor[row]
            want = torch.empty(columns, dtype=torch.float8_e4m3fn)
            if tensor.stride(0) == 1:
                fill.fill_(want[:, None], NAME, tuple(tensor.shape), (0, row))
            else:
                fill.fill_(want[None], NAME, tuple(tensor.shape), (row, 0))
            assert as_bytes(part).equal(as_bytes(want)), row


@pytest.mark.cuda
def test_a_graph_can_hold_it_and_values_do_not_depend_on_the_device():
    out = torch.zeros(300, 500, dtype=torch.bfloat16, device="cuda")
    dummy_init_tensor(out, name=NAME)
    want = hashlib.sha256(as_bytes(out).numpy().tobytes()).hexdigest()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dummy_init_tensor(out, name=NAME)
    out.zero_()
    graph.replay()
    on_cpu = torch.zeros(300, 500, dtype=torch.bfloat16)
    dummy_init_tensor(on_cpu, name=NAME)
    for t in (out, on_cpu):
        assert hashlib.sha256(as_bytes(t).numpy().tobytes()).hexdigest() == want
