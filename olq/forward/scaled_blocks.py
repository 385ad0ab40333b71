"""mxfp8 and nvfp4 with quantized activations through torch.nn.functional.scaled_mm, for compute capability 10.0 on.

    mxfp8   E4M3 codes [M, C] and [R, C], C a multiple of 32; E8M0 bytes, one for 32 columns (BlockWise1x32)
    nvfp4   packed E2M1 codes [M, C / 2] and [R, C / 2], C a multiple of 32; E4M3 bytes, one for 16 columns
            (BlockWise1x16), and a float32 scale for each whole operand (TensorWise)

Both operands' scale bytes are in 128x4 order (SWIZZLE_32_4_4), padded with zeros to whole tiles: 128 * ceil(M / 128)
rows by 4 * ceil(G / 4) columns. The weight's are stored so under `scale_layout="swizzled_128x4"`, those of x are
written so.

Written from the signatures and checks of torch 2.11 and 2.13, and checked against them, and in values, without such a
GPU; it has never run on one. So the table takes it only where it is asked for by name. The bias is added after the
product: what the epilogue of these recipes takes was not tried.

Letters   M = rows of x; R, C = rows and columns of the weight's codes; G = scales a row.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from olq.forward.activations import quantize_nvfp4
from olq.forward.facts import Weight
from olq.forward.scaled import Operands, logical, multiply, widened
from olq.layout.swizzle import padded_shape
from olq.ops.declare import check_bias, check_dtype, check_same_device, check_shape, fail, operator

LAYOUT = "swizzled_128x4"
_SWIZZLED, _PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE


def operands_mxfp8(x: Tensor, codes: Tensor, scale: Tensor, rule: str) -> Operands:
    """Quantize x [M, K] by `rule`, and lay both operands out as the recipe wants them."""
    a, s = torch.ops.olq.quantize_mxfp8(widened(x, codes.shape[1]), LAYOUT, rule)
    e4m3, e8m0, recipe = torch.float8_e4m3fn, torch.float8_e8m0fnu, [ScalingType.BlockWise1x32]
    return Operands(
        a.view(e4m3), codes.view(e4m3).t(), [s.view(e8m0)], recipe, [scale.view(e8m0)], recipe, [_SWIZZLED]
    )


def operands_nvfp4(x: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor) -> Operands:
    """Quantize x [M, K], its tensor scale from its largest magnitude, and lay both operands out."""
    a, s, s_2 = quantize_nvfp4(widened(x, 2 * codes.shape[1]), LAYOUT)
    e2m1, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    return Operands(
        a.view(e2m1),
        codes.view(e2m1).t(),
        [s.view(e4m3), s_2.view(1)],
        recipe,
        [scale.view(e4m3), scale_2.view(1)],
        recipe,
        [_SWIZZLED, _PLAIN],
    )


def _check(name: str, x: Tensor, codes: Tensor, bias: Tensor | None, rows: int, codes_a_byte: int) -> None:
    check_dtype(name, "x", x, torch.bfloat16)
    check_dtype(name, "codes", codes, torch.uint8)
    columns = codes.shape[-1] * codes_a_byte
    if x.dim() != 2 or codes.dim() != 2 or not 0 <= columns - x.shape[1] < 32:
        fail(
            name, "x", f"shape {tuple(x.shape)}", f"[M, K], K rounded up to 32 the {columns} columns of codes"
        )
    if codes.shape[0] % 16 or columns % 32 or not codes.is_contiguous() or rows > codes.shape[0]:
        found = f"shape {tuple(codes.shape)}, strides {tuple(codes.stride())} for {rows} rows"
        fail(name, "codes", found, "at least as many rows, in 16s, columns in 32s, dense")
    check_bias(name, bias, rows, x.dtype, x=x)


def _check_scale(name: str, scale: Tensor, rows: int, columns: int, block: int) -> None:
    check_dtype(name, "scale", scale, torch.uint8)
    check_shape(name, "scale", scale, padded_shape(rows, -(-columns // block)))
    if not scale.is_contiguous():
        fail(name, "scale", f"strides {tuple(scale.stride())}", "a dense tensor in 128x4 order")


def _check_mxfp8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, rule: str = "RCEIL"
) -> None:
    name = "scaled_mm_mxfp8"
    _check(name, x, codes, bias, rows, 1)
    _check_scale(name, scale, rows, x.shape[1], 32)
    check_same_device(name, x=x, codes=codes, scale=scale)


def _check_nvfp4(
    x: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor, bias: Tensor | None, rows: int
) -> None:
    name = "scaled_mm_nvfp4"
    _check(name, x, codes, bias, rows, 2)
    _check_scale(name, scale, rows, x.shape[1], 16)
    check_dtype(name, "scale_2", scale_2, torch.float32)
    check_shape(name, "scale_2", scale_2, (1,))
    check_same_device(name, x=x, codes=codes, scale=scale, scale_2=scale_2)


def _fake_mxfp8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, rule: str = "RCEIL"
) -> Tensor:
    return x.new_empty(x.shape[0], rows)


def _fake_nvfp4(
    x: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    return x.new_empty(x.shape[0], rows)


@operator(
    'Tensor x, Tensor codes, Tensor scale, Tensor? bias, int rows, str rule="RCEIL"',
    _check_mxfp8,
    fake=_fake_mxfp8,
    returns="Tensor",
)
def scaled_mm_mxfp8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, rows: int, rule: str = "RCEIL"
) -> Tensor:
    """`Q(x) @ W.T + bias` into a new contiguous bfloat16 [M, N].

    Args:
        x: bfloat16 [M, K].
        codes, scale: of the weight as `mxfp8` stores them, scales in 128x4 order.
        bias: bfloat16 [N] or None.
        rows: N.
        rule: how an exponent of x is chosen.
    """
    if not len(x):
        return x.new_empty(0, rows)
    return _finish(operands_mxfp8(x, codes, scale, rule), x, bias, rows)


@operator(
    "Tensor x, Tensor codes, Tensor scale, Tensor scale_2, Tensor? bias, int rows",
    _check_nvfp4,
    fake=_fake_nvfp4,
    returns="Tensor",
)
def scaled_mm_nvfp4(
    x: Tensor, codes: Tensor, scale: Tensor, scale_2: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """`Q(x) @ W.T + bias` into a new contiguous bfloat16 [M, N].

    Args:
        x: bfloat16 [M, K].
        codes, scale, scale_2: of a weight of one part as `nvfp4` stores them, block scales in 128x4 order.
        bias: bfloat16 [N] or None.
        rows: N.
    """
    if not len(x):
        return x.new_empty(0, rows)
    return _finish(operands_nvfp4(x, codes, scale, scale_2), x, bias, rows)


def _finish(operands: Operands, x: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    y = logical(multiply(operands, None, x.dtype), x.shape[0], (rows,), (0,))
    return y if bias is None else y.add_(bias)


def path(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """The operator for a layer's weight: [..., K] to [..., N]."""
    x2, tensors = weight.matrix(x.detach()), weight.tensors
    bias = None if bias is None else bias.detach()
    if weight.method == "mxfp8":
        y = torch.ops.olq.scaled_mm_mxfp8(
            x2, tensors[""], tensors["_scale"], bias, weight.rows, weight.params.rule
        )
    else:
        scales = tensors["_scale"], tensors["_scale_2"]
        y = torch.ops.olq.scaled_mm_nvfp4(x2, tensors[""], *scales, bias, weight.rows)
    return y.view(*x.shape[:-1], weight.rows)
