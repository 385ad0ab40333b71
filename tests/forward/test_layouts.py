"""What scaled_mm is given: read back by the words of its recipes in NumPy, and shown to torch's own checks.

The checks are those of torch's fake tensors, which ask of a CUDA device what its kernels ask, without one.
"""

import numpy as np
import pytest
import torch
from forward.layers import loaded, numbers, split
from forward.oracle import e2m1, e4m3, expand, input_values, product, sums, weight_values, worst
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType

from olq.errors import LayoutError
from olq.forward import scaled_blocks, scaled_fp8
from olq.forward.scaled import multiply

SHAPES = [(1, (16,), 32), (5, (100, 30), 100), (131, (130,), 300), (8, (256,), 640)]


def bytes_of(t):
    return t.view(torch.uint8).numpy()


def unswizzled(scale, rows, columns):
    """Scale bytes [rows, columns] out of 128x4 order, one byte at a time."""
    flat, tiles = bytes_of(scale).reshape(-1), -(-columns // 4)
    assert flat.size == -(-rows // 128) * tiles * 512
    out = np.empty((rows, columns), np.uint8)
    for r, c in np.ndindex(rows, columns):
        tile = (r // 128) * tiles + c // 4
        out[r, c] = flat[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4]
    return out


def values(matrix, scales, recipe, swizzle):
    """What one operand [rows, columns], columns dense, stands for: float64."""
    rows = matrix.shape[0]
    if recipe == [ScalingType.BlockWise1x16, ScalingType.TensorWise]:
        assert swizzle == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        assert matrix.dtype == torch.float4_e2m1fn_x2
        columns = 2 * matrix.shape[1]
        of_blocks = e4m3(unswizzled(scales[0], rows, columns // 16))
        return (
            e2m1(bytes_of(matrix), columns) * expand(of_blocks, (rows, columns), (1, 16)) * scales[1].item()
        )
    codes = e4m3(bytes_of(matrix))
    if recipe == [ScalingType.BlockWise1x32]:
        assert swizzle == [SwizzleType.SWIZZLE_32_4_4]
        assert scales[0].dtype == torch.float8_e8m0fnu
        exponents = unswizzled(scales[0], rows, codes.shape[1] // 32).astype(np.int64) - 127
        return codes * expand(np.ldexp(1.0, exponents), codes.shape, (1, 32))
    assert swizzle == [SwizzleType.NO_SWIZZLE]
    scale = scales[0].numpy()
    if recipe == [ScalingType.BlockWise1x128]:
        assert scales[0].stride() == (1, rows)
        assert rows % 4 == 0
        return codes * expand(scale, codes.shape, (1, 128))
    if recipe == [ScalingType.BlockWise128x128]:
        assert scales[0].stride() == (1, scale.shape[0])
        assert scale.shape[0] % 4 == 0
        return codes * expand(scale.T, codes.shape, (128, 128))
    if recipe == [ScalingType.RowWise]:
        return codes * scale.reshape(-1, 1).astype(np.float64)
    assert recipe == [ScalingType.TensorWise]
    return codes * scale.item()


def operands(method, params, m, parts, k, dtype=torch.float32):
    w, x = numbers(1, sum(parts), k), torch.from_numpy(numbers(2, m, k)).to(dtype)
    layer = loaded(method, w, parts, **params)
    tensors = layer.quant_method.stored(layer).tensors
    if method == "mxfp8":
        found = scaled_blocks.operands_mxfp8(x, tensors[""], tensors["_scale"], params.get("rule", "RCEIL"))
    elif method == "nvfp4":
        found = scaled_blocks.operands_nvfp4(x, tensors[""], tensors["_scale"], tensors["_scale_2"])
    else:
        found = scaled_fp8.operands_fp8(
            x,
            tensors[""],
            tensors["_scale"],
            parts,
            params["activations"],
            params.get("scale") == "power_of_two",
        )
    return found, w, x, layer.quant_method.stored(layer)


SWIZZLED = {"activations": "group", "scale_layout": "swizzled_128x4"}
RECIPES = [
    *[
        ("fp8", {"granularity": g, "activations": a})
        for g in ("tensor", "channel")
        for a in ("tensor", "token")
    ],
    ("fp8", {"granularity": "block", "activations": "group"}),
    ("fp8", {"granularity": "block", "activations": "group", "scale": "power_of_two"}),
    ("mxfp8", SWIZZLED),
    ("mxfp8", {**SWIZZLED, "rule": "CEIL"}),
    ("nvfp4", {**SWIZZLED, "scale_sharing": "common"}),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "params"), RECIPES, ids=str)
def test_operands_stand_for_the_quantized_values(method, params, shape):
    m, parts, k = shape
    found, w, x, stored = operands(method, params, m, parts, k)
    swizzle = found.swizzle
    a = values(found.a, found.scale_a, found.recipe_a, swizzle)
    b = values(found.b.t(), found.scale_b, found.recipe_b, swizzle)
    want_a = input_values(method, x.numpy(), params)
    want_b = weight_values(method, split(w, parts), params)
    assert np.array_equal(a[:m, :k], want_a)
    assert not a[:m, k:].any()
    logical = np.concatenate([b[s : s + n] for n, s in zip(stored.parts, stored.starts, strict=True)])
    assert np.array_equal(logical[:, :k], want_b)
    assert not logical[:, k:].any()


@pytest.mark.parametrize("shape", [(1, (128,), 512), (8, (256, 128), 640), (130, (384,), 1024)], ids=str)
@pytest.mark.parametrize(("method", "params"), RECIPES, ids=str)
def test_torch_takes_the_operands_as_they_are(method, params, shape):
    """Blocks of K and N in 128s: for others torch's own rule of shapes is not that of its kernel (see scaled_fp8)."""
    m, parts, k = shape
    found, *_ = operands(method, params, m, parts, k, torch.bfloat16)
    with FakeTensorMode() as mode:
        moved = [
            [like(mode, t) for t in field] if isinstance(field, list) and isinstance(field[0], torch.Tensor)
            else like(mode, field) if isinstance(field, torch.Tensor) else field
            for field in found
        ]  # fmt: skip
        y = multiply(type(found)(*moved), None, torch.bfloat16)
    assert tuple(y.shape) == (found.a.shape[0], found.b.shape[1])
    assert y.dtype == torch.bfloat16


def like(mode, t):
    """A tensor of the same strides on a CUDA device that need not be there."""
    with mode:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


def multiplied(found, bias, dtype):
    """scaled_mm in NumPy: exact products, one rounding."""
    a = values(found.a, found.scale_a, found.recipe_a, found.swizzle)
    b = values(found.b.t(), found.scale_b, found.recipe_b, found.swizzle)
    assert bias is None
    return torch.from_numpy(a @ b.T).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("method", "params"), RECIPES[-3:], ids=str)
def test_block_formats_with_a_product_in_numpy(monkeypatch, method, params, shape, bias):
    """The whole of the paths that no machine here can run, but for the product."""
    monkeypatch.setattr(scaled_blocks, "multiply", multiplied)
    m, parts, k = shape
    _, w, x, stored = operands(method, params, m, parts, k, torch.bfloat16)
    b = torch.from_numpy(numbers(3, sum(parts))).bfloat16() if bias else None
    y = scaled_blocks.path(stored, x.view(1, m, k), b)
    assert (y.dtype, tuple(y.shape), y.is_contiguous()) == (x.dtype, (1, m, sum(parts)), True)
    offset = None if b is None else b.double().numpy()
    exact, magnitude = product(
        input_values(method, x.float().numpy(), params),
        weight_values(method, split(w, parts), params),
        offset,
    )
    assert worst(y[0].float().numpy(), exact, magnitude, sums(k), "bfloat16", offset) <= 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_fp8_with_a_product_in_numpy(monkeypatch, shape):
    monkeypatch.setattr(scaled_fp8, "multiply", multiplied)
    m, parts, k = shape
    params = {"granularity": "block", "activations": "group"}
    _, w, x, stored = operands("fp8", params, m, parts, k, torch.bfloat16)
    y = scaled_fp8.path(stored, x, None)
    exact, magnitude = product(
        input_values("fp8", x.float().numpy(), params), weight_values("fp8", split(w, parts), params)
    )
    assert worst(y.float().numpy(), exact, magnitude, sums(k), "bfloat16") <= 1


OPS = torch.ops.olq
CODES = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1)
ROW = [16], [0], "token", False


@pytest.mark.parametrize(
    ("call", "argument", "need"),
    [
        (lambda x: OPS.scaled_mm_fp8(x.double(), *CODES, None, *ROW), "x", "torch.float32 or"),
        (lambda x: OPS.scaled_mm_fp8(x[0], *CODES, None, *ROW), "x", "[M, K], K at most the 32 columns"),
        (
            lambda x: OPS.scaled_mm_fp8(x, *CODES, None, [16], [0], "row", False),
            "activations",
            "one of tensor",
        ),
        (lambda x: OPS.scaled_mm_fp8(x, CODES[0][:15], CODES[1], None, *ROW), "codes", "in 16s"),
        (lambda x: OPS.scaled_mm_fp8(x, *CODES, None, [17], *ROW[1:]), "parts", "within 16 rows"),
        (lambda x: OPS.scaled_mm_fp8(x, *CODES, None, [], [], "group", False), "parts", "one part or more"),
        (
            lambda x: OPS.scaled_mm_fp8(x, *CODES, None, [8], [8], "token", False),
            "starts",
            "one after the other",
        ),
        (lambda x: OPS.scaled_mm_fp8(x, *CODES, torch.ones(15), *ROW), "bias", "shape (16,)"),
        (lambda x: OPS.scaled_mm_mxfp8(x, *CODES, None, 16, "RCEIL"), "x", "torch.bfloat16"),
        (lambda x: OPS.scaled_mm_mxfp8(x.bfloat16(), *CODES[:1] * 2, None, 16, "RCEIL"), "scale", "(128, 4)"),
        (
            lambda x: OPS.scaled_mm_nvfp4(x[:, :1].bfloat16(), *CODES, torch.ones(1), None, 16),
            "x",
            "up to 32",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, argument, need):
    with pytest.raises(LayoutError, match=f"can't take this {argument}") as raised:
        call(torch.ones(2, 32))
    assert need in raised.value.need
