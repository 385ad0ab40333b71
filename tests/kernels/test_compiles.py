"""Kernels of products and of whole matrices compile for GPUs that are not here: what Triton's interpreter can't say."""

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


def compile_all(operator: str, args: tuple[object, ...], capability: int) -> list[str]:
    """Compile what a call launches; the kernels' names."""
    plan = plans.plan(operator, args)
    assert isinstance(plan, Plan), plan
    plan = plan.together or plan
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    for one in plan.launches:
        assert "cubin" in compiled(one, tensors, capability).asm
    return [one.kernel for one in plan.launches]


WAYS = [
    ("dense", torch.bfloat16, 80),
    ("dense", torch.bfloat16, 90),
    ("dense", torch.float16, 90),
    ("steps", torch.bfloat16, 90),
    ("dense", torch.bfloat16, 100),
]
CALLS = [(form, m, k) for form in FORMATS for m, k in ((1, 512), (9, 512), (40, 300))]
LOOPS = [(form, 9) for form in ("fp8 channel", "fp8 block", "mxfp8 linear", "nvfp4 linear")]
LOOPS += [
    ("nvfp4 linear", 2),
    ("nvfp4 linear", 20),
    ("nvfp4 linear", 40),
    ("mxfp8 linear", 8),
]
"""Divisions of their own, of which a program walks several steps."""


@pytest.mark.parametrize(("way", "dtype", "capability"), WAYS, ids=str)
@pytest.mark.parametrize(("form", "m", "k"), CALLS)
def test_products_compile(form, m, k, way, dtype, capability):
    weight = make(form, [64], k, decode=False)
    x = torch.zeros(m, 2 * k, dtype=dtype)[:, :: 2 if way == "steps" else 1][:, :k]
    args = (x.new_empty(m, 64), *weight.args(x, torch.zeros(64, dtype=dtype)))
    assert compile_all(weight.operator, args, capability)


@pytest.mark.parametrize(("form", "m"), LOOPS)
def test_loops_over_steps_compile(form, m):
    weight = make(form, [64], 8192, decode=False)
    x = torch.zeros(m, 8192, dtype=torch.bfloat16)
    args = (x.new_empty(m, 64), *weight.args(x, None))
    plan = plans.plan(weight.operator, args)
    assert isinstance(plan, Plan)
    assert plan.launches[0].constants["STEPS"] > 1
    assert compile_all(weight.operator, args, 90)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("form", ["fp8 channel", "fp8 block"])
@pytest.mark.parametrize("m", [1, 9])
def test_products_of_codes_compile(form, m, capability):
    weight = make(form, [64], 512)
    x, s = torch.zeros(m, 512, dtype=torch.uint8), torch.ones(m, 4 if form == "fp8 block" else 1)
    out = torch.empty(m, 64, dtype=torch.bfloat16)
    args = (x, s, *weight.tensors, None, [64], [0], *weight.rest, out)
    assert compile_all("multiply_codes_fp8_", args, capability) == ["linear_small.product"]


@pytest.mark.parametrize("columns", [8192, 8200], ids=["whole units", "a rest"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [90, 100])
def test_one_launch_for_a_whole_matrix_compiles(columns, dtype, capability):
    w = torch.empty(1400, columns, dtype=dtype, device="meta")
    args = (w, torch.empty_like(w, dtype=torch.uint8), w.new_empty(1, 1, dtype=torch.float32), 0, 0, False)
    names = compile_all("quantize_fp8_", args, capability)
    assert names == ["tensor_once.clear", "tensor_once.quantize_tensor"]
