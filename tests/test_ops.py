"""The operators' contract: schemas, fakes, compilation, grad modes, and what they say to arguments that don't fit."""

import pytest
import torch

import olq.ops  # noqa: F401  (registers the operators)
from olq.errors import LayoutError, OlqError, UnknownNameError

OPS = torch.ops.olq
U8 = torch.uint8


def u8(*shape):
    return torch.zeros(*shape, dtype=U8)


def samples():
    """name -> arguments, small and ragged."""
    w = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    experts = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    place, tail = ("linear", 0, 1, 0), (torch.bfloat16, True)
    swizzled = ("swizzled_128x4", 2, 2, 1)
    return {
        "quantize_fp8_": [
            (w, u8(3, 40), torch.zeros(3, 1), 1, 0, False, None, False),
            (w, u8(3, 40), torch.zeros(1, 1), 0, 0, True, *tail),
            (experts, u8(2, 3, 40), torch.zeros(2, 2, 3), 2, 16, False, *tail),
        ],
        "quantize_mxfp8_": [
            (w, u8(3, 40), u8(3, 2), "RCEIL", *place, None, False),
            (experts, u8(2, 3, 40), u8(2, 128, 4), "EVEN", *swizzled, *tail),
        ],
        "nvfp4_tensor_scale_": [
            (w, torch.zeros(()), None, False),
            (experts, torch.zeros(2), *tail),
        ],
        "quantize_nvfp4_": [
            (w, u8(3, 20), u8(3, 3), torch.tensor(1e-3), *place, None, False),
            (experts, u8(2, 3, 20), u8(2, 128, 4), torch.full((2,), 1e-3), *swizzled, *tail),
        ],
        "dequantize_fp8_": [(u8(3, 40), torch.ones(3, 1), torch.zeros(3, 40), 1, 0)],
        "dequantize_mxfp8_": [(u8(3, 40), u8(3, 2), torch.zeros(3, 40), *place)],
        "dequantize_nvfp4_": [
            (u8(3, 20), u8(3, 3), torch.tensor(1.0), torch.zeros(3, 39, dtype=torch.bfloat16), *place)
        ],
    }


CALLS = [
    pytest.param(name, args, id=f"{name}{i}")
    for name, many in samples().items()
    for i, args in enumerate(many)
]
OUTPUTS = {
    "dequantize_fp8_": (2,),
    "dequantize_mxfp8_": (2,),
    "dequantize_nvfp4_": (3,),
    "nvfp4_tensor_scale_": (1,),
}


def copies(args):
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def bytes_of(t):
    return t.cpu().contiguous().view(-1).view(U8)


def outputs(name, args):
    return [args[i] for i in OUTPUTS.get(name, (1, 2))]


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_opcheck(name, args):
    torch.library.opcheck(getattr(OPS, name).default, copies(args))


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_meta_tensors_are_checked_and_nothing_is_done(name, args):
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    assert getattr(OPS, name)(*on_meta) is None
    first = OUTPUTS.get(name, (1, 2))[0]
    on_meta[first] = on_meta[first].new_empty(7, 7, 7, 7)
    with pytest.raises(LayoutError, match=rf"{name} can't take this[\s\S]*\(7, 7, 7,"):
        getattr(OPS, name)(*on_meta)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch 2.11's compiler, of itself
@pytest.mark.parametrize(("name", "args"), CALLS)
def test_compiles_as_one_graph_and_writes_in_place(name, args):
    op = getattr(OPS, name)
    torch.compiler.reset()
    eager, compiled = copies(args), copies(args)
    op(*eager)
    torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*compiled)
    for got, want in zip(outputs(name, compiled), outputs(name, eager), strict=True):
        assert torch.equal(bytes_of(got), bytes_of(want))


def test_the_last_two_arguments_have_defaults():
    w = torch.randn(2, 32)
    codes, scale = u8(2, 32), u8(2, 1)
    OPS.quantize_mxfp8_(w, codes, scale, "RCEIL", "linear", 0, 1, 0)
    assert codes.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_source_that_requires_grad_is_only_read(mode):
    w = torch.nn.Parameter(torch.randn(2, 32))
    codes, scale = u8(2, 32), torch.zeros(2, 1)
    with mode():
        OPS.quantize_fp8_(w, codes, scale, 1, 0, False)
    assert codes.any()
    assert not scale.requires_grad
    assert w.grad is None


def test_a_call_keeps_every_address():
    w = torch.randn(200, 300)
    codes, scale = u8(200, 300), torch.zeros(2, 3)
    before = codes.data_ptr(), scale.data_ptr(), codes._version
    OPS.quantize_fp8_(w, codes, scale, 128, 128, False)
    assert (codes.data_ptr(), scale.data_ptr()) == before[:2]
    assert codes._version > before[2]  # autograd knows that they were written


W = torch.zeros(3, 40)
PLACE = ("linear", 0, 1, 0)
MISFITS = {
    "codes of another shape": (
        lambda: OPS.quantize_fp8_(W, u8(3, 41), torch.zeros(3, 1), 1, 0, False),
        r"quantize_fp8_ can't take this codes.\n"
        r"  where:  torch.ops.olq.quantize_fp8_, argument 'codes'\n"
        r"  found:  shape \(3, 41\)\n"
        r"  need:   shape \(3, 40\)\n"
        r"  remedy: make the storage with olq.alloc",
    ),
    "codes that are not bytes": (
        lambda: OPS.quantize_fp8_(W, torch.zeros(3, 40), torch.zeros(3, 1), 1, 0, False),
        r"found:  torch.float32\n  need:   torch.uint8",
    ),
    "a scale grid of another block": (
        lambda: OPS.quantize_fp8_(W, u8(3, 40), torch.zeros(3, 1), 2, 16, False),
        r"argument 'scale'\n  found:  shape \(3, 1\)\n  need:   shape \(2, 3\)",
    ),
    "a scale in bfloat16": (
        lambda: OPS.quantize_fp8_(W, u8(3, 40), torch.zeros(3, 1).bfloat16(), 1, 0, False),
        r"found:  torch.bfloat16\n  need:   torch.float32",
    ),
    "a negative block": (
        lambda: OPS.quantize_fp8_(W, u8(3, 40), torch.zeros(3, 1), -1, 0, False),
        r"found:  \(-1, 0\)\n  need:   positive, or 0 for the whole extent",
    ),
    "a source that is quantized": (
        lambda: OPS.quantize_fp8_(u8(3, 40), u8(3, 40), torch.zeros(3, 1), 1, 0, False),
        r"argument 'source'\n  found:  torch.uint8\n  need:   torch.float32 or torch.bfloat16",
    ),
    "a source in float8": (
        lambda: OPS.quantize_fp8_(
            u8(3, 40).view(torch.float8_e4m3fn), u8(3, 40), torch.zeros(3, 1), 1, 0, False
        ),
        r"argument 'source'\n  found:  torch.float8_e4m3fn",
    ),
    "a vector": (
        lambda: OPS.quantize_fp8_(W[0], u8(40), torch.zeros(1, 1), 1, 0, False),
        r"found:  1 dimensions\n  need:   \[\*lead, n, k\]",
    ),
    "through an integer": (
        lambda: OPS.quantize_fp8_(W, u8(3, 40), torch.zeros(3, 1), 1, 0, False, torch.int8),
        r"argument 'through'\n  found:  torch.int8",
    ),
    "scales that do not hold the blocks": (
        lambda: OPS.quantize_mxfp8_(W, u8(3, 40), u8(3, 1), "RCEIL", *PLACE),
        r"found:  shape \(3, 1\)\n  need:   at least 3 rows and 2 columns",
    ),
    "rows that end outside": (
        lambda: OPS.quantize_mxfp8_(W, u8(3, 40), u8(6, 2), "RCEIL", "linear", 1, 3, 0),
        r"need:   at least 8 rows and 2 columns",
    ),
    "a place before the start": (
        lambda: OPS.quantize_mxfp8_(W, u8(3, 40), u8(6, 2), "RCEIL", "linear", -1, 1, 0),
        r"found:  row -1, row_step 1, column 0\n  need:   row >= 0, row_step >= 1, column >= 0",
    ),
    "an unknown layout": (
        lambda: OPS.quantize_mxfp8_(W, u8(3, 40), u8(3, 2), "RCEIL", "swizzled", 0, 1, 0),
        r"found:  'swizzled'\n  need:   one of linear, swizzled_128x4",
    ),
    "swizzled scales without padding": (
        lambda: OPS.quantize_mxfp8_(W, u8(3, 40), u8(3, 4), "RCEIL", "swizzled_128x4", 0, 1, 0),
        r"need:   rows in 128s, columns in 4s, the last two dimensions dense",
    ),
    "swizzled scales with gaps": (
        lambda: OPS.quantize_mxfp8_(W, u8(3, 40), u8(128, 8)[:, :4], "RCEIL", "swizzled_128x4", 0, 1, 0),
        r"found:  shape \(128, 4\), strides \(8, 1\)",
    ),
    "other leading dimensions": (
        lambda: OPS.quantize_mxfp8_(W[None], u8(1, 3, 40), u8(3, 2), "RCEIL", *PLACE),
        r"found:  shape \(3, 2\)\n  need:   \(1, 'R', 'C'\)",
    ),
    "unpacked codes": (
        lambda: OPS.quantize_nvfp4_(W, u8(3, 40), u8(3, 3), torch.tensor(1.0), *PLACE),
        r"argument 'codes'\n  found:  shape \(3, 40\)\n  need:   shape \(3, 20\)",
    ),
    "a tensor scale with a dimension": (
        lambda: OPS.nvfp4_tensor_scale_(W, torch.zeros(1)),
        r"argument 'scale_2'\n  found:  shape \(1,\)\n  need:   shape \(\)",
    ),
    "an output in float64": (
        lambda: OPS.dequantize_fp8_(u8(3, 40), torch.zeros(3, 1), torch.zeros(3, 40).double(), 1, 0),
        r"argument 'out'\n  found:  torch.float64\n  need:   torch.float32 or torch.bfloat16 or torch.float16",
    ),
    "results on two devices": (
        lambda: OPS.quantize_fp8_(W, u8(3, 40), torch.zeros(3, 1, device="meta"), 1, 0, False),
        r"argument 'scale'\n  found:  meta\n  need:   cpu, where 'codes' is",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_misfit_is_refused_with_the_facts_and_nothing_is_written(misfit):
    call, text = MISFITS[misfit]
    with pytest.raises(LayoutError, match=text) as caught:
        call()
    assert isinstance(caught.value, OlqError)
    assert str(caught.value).count("\n") == 4


def test_an_unknown_rule_is_refused():
    with pytest.raises(UnknownNameError, match=r"'ceil'[\s\S]*need:   one of RCEIL, FLOOR, CEIL, EVEN"):
        OPS.quantize_mxfp8_(W, u8(3, 40), u8(3, 2), "ceil", *PLACE)


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (0, 0), (0, 3, 40), (2, 0, 40)])
def test_empty_tensors_are_fine(shape):
    *lead, n, k = shape
    w, codes = torch.zeros(shape), u8(*shape)
    for block in ((0, 0), (1, 0), (128, 128)):
        grid = [-(-extent // b) if b else 1 for extent, b in zip((n, k), block, strict=True)]
        scale = torch.full((*lead, *grid), 7.0)
        OPS.quantize_fp8_(w, codes, scale, *block, False)
        assert (scale == 1).all()
        OPS.dequantize_fp8_(codes, scale, torch.zeros(shape), *block)
    OPS.quantize_mxfp8_(w, codes, u8(*lead, n, -(-k // 32)), "RCEIL", *PLACE)
    scale_2 = torch.full(lead, 7.0)
    OPS.nvfp4_tensor_scale_(w, scale_2)
    assert (scale_2 == 1).all()
    packed, scale = u8(*lead, n, -(-k // 2)), u8(*lead, n, -(-k // 16))
    OPS.quantize_nvfp4_(w, packed, scale, scale_2, *PLACE)
    OPS.dequantize_nvfp4_(packed, scale, scale_2, torch.zeros(shape), *PLACE)


@pytest.mark.cuda
@pytest.mark.parametrize("where", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")], ids=str)
@pytest.mark.parametrize(("name", "args"), CALLS)
def test_every_device_gives_the_bytes_of_the_cpu(name, args, where):
    source, results = where
    moved = tuple(
        a.to(source if i == 0 and not name.startswith("deq") else results)
        if isinstance(a, torch.Tensor)
        else a
        for i, a in enumerate(copies(args))
    )
    want = copies(args)
    getattr(OPS, name)(*moved)
    getattr(OPS, name)(*want)
    for got, right in zip(outputs(name, moved), outputs(name, want), strict=True):
        assert torch.equal(bytes_of(got), bytes_of(right))
