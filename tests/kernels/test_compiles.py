"""Kernels of products compile for GPUs that are not here: what Triton's interpreter can't say. Needs no GPU."""

import pytest
import torch
from kernels.linear_cases import FORMATS, make

from olq.kernels import launching, plans
from olq.kernels.shapes import SCRATCH, Launch, Plan

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.backends.compiler")

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}
UNSPECIALIZED = ("scale_column",)
pytestmark = pytest.mark.skipif(launching.interpreted(), reason="the interpreter compiles nothing")


def compiled(one: Launch, tensors: list[torch.Tensor], capability: int) -> object:
    """What Triton's front would compile for these tensors on a GPU of this capability."""
    kernel = launching._kernel(one.kernel)
    signature, constants, divisible = {}, {}, {}
    settings = {**one.constants, "HARDWARE": capability >= 89, "EARLY": capability >= 90}
    for i, name in enumerate(kernel.arg_names):
        number = i - len(one.operands)
        if number < 0:
            tensor = one.operands[i]
            signature[name] = "*fp32" if tensor == SCRATCH else TYPES[tensors[tensor].dtype]
            divisible[(i,)] = [["tt.divisibility", 16]]
        elif number < len(one.numbers) and (one.numbers[number] != 1 or name in UNSPECIALIZED):
            signature[name] = "i32"
            if one.numbers[number] % 16 == 0:
                divisible[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[name] = 1 if number < len(one.numbers) else settings[name]
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": one.warps, "enable_fp_fusion": False, **one.options}
    return triton.compile(source, target=compiler.GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(("way", "capability"), [("dense", 80), ("dense", 90), ("steps", 90), ("dense", 100)])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("m", "k"), [(1, 512), (9, 512), (40, 300)])
def test_products_compile(form, m, k, way, capability):
    weight = make(form, [64], k)
    x = torch.zeros(m, 2 * k, dtype=torch.bfloat16)[:, :: 2 if way == "steps" else 1][:, :k]
    args = (x.new_empty(m, 64), *weight.args(x, torch.zeros(64, dtype=x.dtype)))
    plan = plans.plan(weight.operator, args)
    assert isinstance(plan, Plan)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    for one in plan.launches:
        assert "cubin" in compiled(one, tensors, capability).asm
