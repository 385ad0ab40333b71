"""Products with quantized weights on a GPU: compiled, in graphs, without waiting; which rows of x take which path."""

import pytest
import torch
from kernels.compare import like
from kernels.linear_cases import FORMATS, largest_error, make
from torch import Tensor

from numerics.cases import OPS
from olq import kernels
from olq.kernels import plan_shares, plans
from olq.kernels.shapes import Plan
from olq.ops import linear

pytestmark = [pytest.mark.cuda, pytest.mark.unaudited(reason="launches are repeated without Triton's front")]
FORMS = pytest.mark.parametrize("form", FORMATS)


def on_gpu(form: str, m: int, parts: list[int], k: int, dtype: torch.dtype = torch.bfloat16):
    weight = make(form, parts, k)
    generator = torch.Generator().manual_seed(m)
    x, bias = (
        torch.randn(m, k, generator=generator).to(dtype),
        torch.randn(sum(parts), generator=generator).to(dtype),
    )
    args = [like(a, "cuda") if isinstance(a, Tensor) else a for a in weight.args(x, bias)]
    return weight, x, bias, args


@FORMS
@pytest.mark.parametrize("m", [1, 3, 8, 16, 17, 32, 33, 64, 65, 300])
def test_every_number_of_rows_is_right(form, m):
    weight, x, bias, args = on_gpu(form, m, [100, 130], 1024)
    operator = getattr(OPS, weight.operator)
    for _ in range(3):
        y = operator(*args)
        assert largest_error(y.cpu(), x, weight.operand(x, bias), bias) <= weight.allowed(x, bias, "cuda")
    out = torch.empty(m, 230, dtype=x.dtype, device="cuda")
    found = kernels.path(weight.operator, out, *args)
    few = m <= plan_shares.row_limit(weight.operator.removeprefix("matmul_"))
    assert bool(found.kernels) == few, found
    assert few or "decoded bands are faster" in found.reason


@FORMS
@pytest.mark.parametrize("m", [4, 40])
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_in_a_compiled_function(form, m):
    torch.compiler.reset()  # it gives up a function that it compiled eight times, whatever that closes over
    weight, _, _, args = on_gpu(form, m, [64, 32], 512)
    operator = getattr(OPS, weight.operator)

    @torch.compile(fullgraph=True)
    def layer(x: Tensor) -> Tensor:
        return operator(x * 2, *args[1:]) + 1

    y = layer(args[0])
    want = operator(args[0] * 2, *args[1:]) + 1
    assert torch.equal(y, want)


@FORMS
@pytest.mark.parametrize("m", [1, 16, 40])
def test_a_graph_multiplies_new_values(form, m):
    weight, _, _, args = on_gpu(form, m, [64, 48], 512)
    operator = getattr(OPS, weight.operator)
    operator(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = operator(*args)
    args[0].copy_(torch.randn(m, 512))
    graph.replay()
    assert torch.equal(y, operator(*args))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
@pytest.mark.parametrize("m", [1, 16, 40])
def test_no_product_waits_for_the_gpu(m):
    calls = [
        (weight.operator, args) for weight, *_, args in (on_gpu(form, m, [64, 48], 512) for form in FORMATS)
    ]
    for operator, args in calls:
        getattr(OPS, operator)(*args)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for operator, args in calls:
            getattr(OPS, operator)(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak(args: list[object]) -> tuple[int, Tensor]:
    """Bytes that a product of mxfp8 takes at most, its result among them; and the result."""
    OPS.matmul_mxfp8(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = OPS.matmul_mxfp8(*args)
    return torch.cuda.max_memory_allocated() - before, y


def test_bands_take_bounded_memory():
    weight, x, _, args = on_gpu("mxfp8 linear", plan_shares.row_limit("mxfp8") + 1, [6000], 2048)
    out = torch.empty(len(x), 6000, dtype=x.dtype, device="cuda")
    assert "decoded bands are faster" in kernels.path(weight.operator, out, *args).reason
    most, y = peak(args)
    assert most <= linear.BAND_BYTES + y.numel() * 2 + 4096


def test_shares_take_four_bytes_an_element_each():
    weight, x, _, args = on_gpu("mxfp8 linear", 64, [6000], 2048)
    plan = plans.plan(weight.operator, (torch.empty(64, 6000, dtype=x.dtype, device="cuda"), *args))
    assert isinstance(plan, Plan)
    assert plan.scratch == plan.launches[0].constants["SHARES"] * 64 * 6000
    most, y = peak(args)
    assert most <= 4 * plan.scratch + y.numel() * 2 + 4096


def test_a_second_call_is_launched_without_tritons_front():
    for form in FORMATS:
        weight, _, _, args = on_gpu(form, 5, [64, 48], 512)
        want = getattr(OPS, weight.operator)(*args)
        # torch hands an operator no last arguments that have their default values.
        renewed = kernels.renew(weight.operator, args[:-1] if args[-1] == "linear" else args)
        assert renewed is not None, form
        assert torch.equal(renewed[0], want)


@FORMS
@pytest.mark.parametrize("m", [1, 16])
def test_a_product_that_starts_early_waits_for_what_it_reads(form, m):
    """A chain in which each product reads what the one in front wrote, and weights are written between two products."""
    weight, _, _, args = on_gpu(form, m, [512], 512)
    args[-len(weight.rest) - 3] = None  # no bias
    operator, codes = getattr(OPS, weight.operator), args[1]
    one, other = codes.clone(), codes.roll(7, 0)

    def chain(wait: bool) -> Tensor:
        y = args[0]
        for step in range(24):
            codes.copy_(one if step % 3 else other)
            y = operator(y, *args[1:])
            y = operator(y * (1 / y.abs().amax()), *args[1:])
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    assert want.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(wait=False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(wait=False)
    for _ in range(20):
        graph.replay()
    assert torch.equal(y, want)
