"""fp8 with quantized activations: one operator quantizes x and multiplies, by scaled_mm or by our kernel for few rows.

    scales of W        of x            recipe of torch.nn.functional.scaled_mm
    tensor, one part   tensor, 1 row   TensorWise x TensorWise
    tensor, channel    tensor, token   RowWise x RowWise; up to `FEW_ROWS` rows TensorWise x TensorWise, without the
                                       scales that are not tensors', into float32 to which they are applied
    block 128 x 128    group           BlockWise1x128 x BlockWise128x128, on compute capability 9.x
    all but the first line's           none for 16-bit x on a GPU with few rows, up to `olq.kernels`' limit:
                                       torch.ops.olq.multiply_codes_fp8_ reads the weight faster than cuBLAS does

What cuBLAS and torch ask for, and where it comes from:

    codes of W   [R, C] row by row, passed transposed; R and C multiples of 16 (scaled_mm checks it). The kernel format
                 of fp8 is padded so; x gets C columns.
    RowWise      float32 [M, 1] and [1, R], contiguous. One scale a part becomes one a row: several parts are one call.
    1x128        float32 [M, C / 128], strides (1, M): scaled_mm takes no other, and cuBLAS reads columns that start on
                 16 bytes, so M is padded to a multiple of 4.
    128x128      float32 [L4, R / 128], strides (1, L4), with L4 = C / 128 rounded up to a multiple of 4: the layout
                 of cuBLAS (its manual: 1D and 128x128 2D block scaling for FP8). Where C / 128 is a multiple of 4 it is
                 the stored scale seen transposed; else the scales are padded in each call.

An operator of our own, since scaled_mm's shape rule for torch.compile divides K and N by 128 and drops the rest
(torch 2.11 and 2.13), and since what is padded depends on M, which a compiled graph need not know then.

Letters   M = rows of x, N = sum of parts; R, C = rows and columns of the codes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from olq import kernels
from olq.forward.activations import FP8_UNITS, quantize_fp8
from olq.forward.facts import Weight
from olq.forward.scaled import Operands, logical, multiply, packed, widened
from olq.kernels.plan_shares import row_limit
from olq.layout.order import round_up
from olq.ops.declare import (
    OUT_DTYPES,
    check_bias,
    check_dtype,
    check_same_device,
    check_shape,
    fail,
    operator,
)

GROUP = 128
#: Rows of x that 1x128 scales need a multiple of.
ROWS_ALIGNMENT = 4
#: Up to so many rows of x that scaled_mm multiplies, RowWise scales are applied to a float32 product: cuBLAS is faster
#: without them. Tuned on an H200 for 8192 x 8192.
FEW_ROWS = 64
_E4M3 = torch.float8_e4m3fn
_PLAIN = [SwizzleType.NO_SWIZZLE]
_TENSOR = [ScalingType.TensorWise]
_ONES: dict[torch.device, Tensor] = {}


def operands_fp8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    parts: Sequence[int],
    activations: str,
    power_of_two: bool,
) -> Operands:
    """Quantize x, and lay both operands out as the recipe wants them.

    Args:
        x: [M, K], M and K not 0.
        codes, scale: of the weight as `fp8` stores them.
        parts: rows of each part.
        activations, power_of_two: how x is quantized.
    """
    rows = codes.shape[0]
    x, b = widened(x, codes.shape[1]), codes.view(_E4M3).t()
    if activations == "group":
        a, s = quantize_fp8(x, "group", power_of_two, round_up(x.shape[0], ROWS_ALIGNMENT))
        missing = -scale.shape[1] % 4
        s_b = functional.pad(scale, (0, missing)) if missing else scale
        recipes = [ScalingType.BlockWise1x128], [ScalingType.BlockWise128x128]
        return Operands(a.view(_E4M3), b, [s], recipes[0], [s_b.t()], recipes[1], _PLAIN)
    a, s = quantize_fp8(x, activations, power_of_two)
    if s.numel() == 1 and scale.shape == (1,):
        return Operands(a.view(_E4M3), b, [s], _TENSOR, [scale.view(1, 1)], _TENSOR, _PLAIN)
    if activations == "tensor":
        s = s.repeat(x.shape[0], 1)
    recipe = [ScalingType.RowWise]
    return Operands(a.view(_E4M3), b, [s], recipe, [_of_rows(scale, parts, rows)], recipe, _PLAIN)


def has_kernel(x: Tensor, scale: Tensor, activations: str) -> bool:
    """Whether `by_codes` is a kernel's work that pays, for x [M, K], a result of its dtype, and the weight's scale."""
    few = x.is_cuda and x.dtype != torch.float32 and x.shape[0] <= row_limit("fp8 codes")
    return few and not _single(x, scale, activations) and kernels.unavailable((x,)) is None


def _single(x: Tensor, scale: Tensor, activations: str) -> bool:
    """Whether both matrices have one scale: cuBLAS is fast then, for few rows too."""
    return scale.shape == (1,) and (activations == "tensor" or x.shape[0] == 1)


def by_codes(
    a: Tensor,
    s: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    activations: str,
    dtype: torch.dtype,
) -> Tensor:
    """The product of two matrices of codes: [M, N].

    Args:
        a, s: x as `quantize_fp8` gives it for the columns of `codes`.
        codes, scale: of the weight.
        bias: [N] or None.
        parts, starts: rows of each part, and its first row in codes.
        activations: how x was quantized.
        dtype: of the result.
    """
    out = s.new_empty(a.shape[0], sum(parts), dtype=dtype)
    block = (0, 0) if scale.dim() == 1 else (GROUP, GROUP) if activations == "group" else (1, 0)
    bias = None if bias is None else bias.contiguous()
    torch.ops.olq.multiply_codes_fp8_(a, s, codes, scale, bias, list(parts), list(starts), *block, out)
    return out


def few_rows(
    a: Tensor,
    s: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The product of codes in float32, then scales of rows and columns, then the bias, then the one rounding: [M, N].

    Args:
        a, s: x as `quantize_fp8` gives it for the columns of `codes`, by "tensor" or "token".
        codes, scale: of the weight; not one scale for all of it where `s` is one for all of x.
        bias: [N] or None.
        parts: rows of each part, one after the other.
        dtype: of the result.
    """
    rows, one = sum(parts), _one(a.device)
    of_rows = None if s.numel() == 1 else s
    of_columns = None if scale.shape == (1,) else _of_rows(scale, parts, rows)[:, :rows]
    inside = [s if of_rows is None else one], [scale.view(1, 1) if of_columns is None else one]
    b = codes.view(_E4M3).t()
    operands = Operands(a.view(_E4M3), b, inside[0], _TENSOR, inside[1], _TENSOR, _PLAIN)
    product = multiply(operands, None, torch.float32)[:, :rows]
    out = s.new_empty(a.shape[0], rows, dtype=dtype)
    torch.ops.olq.scale_product_(product, of_rows, of_columns, bias, out)
    return out


def _one(device: torch.device) -> Tensor:
    """A scale that changes nothing, float32 [1, 1]: made once for a device and waited for, so that all streams may
    read it.
    """
    one = _ONES.get(device)
    if one is None:
        with torch.inference_mode(False):
            one = torch.ones(1, 1, device=device)
        if device.type != "cuda":
            _ONES[device] = one
        elif not torch.cuda.is_current_stream_capturing():  # else its memory is the graph's, and stays there
            torch.cuda.current_stream(device).synchronize()
            _ONES[device] = one
    return one


def _of_rows(scale: Tensor, parts: Sequence[int], rows: int) -> Tensor:
    """One scale for each row of codes, float32 [1, rows or more]."""
    return rows_of_parts(scale, parts, rows)[None] if scale.dim() == 1 else scale.t()


def rows_of_parts(scale: Tensor, parts: Sequence[int], rows: int) -> Tensor:
    """One scale for each row of codes, [R], from one for each part; the last one also stands for the padding."""
    counts = [*parts[:-1], rows - sum(parts[:-1])]
    return torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate(counts)])


def _check(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    activations: str,
    power_of_two: bool,
) -> None:
    name = "scaled_mm_fp8"
    check_dtype(name, "x", x, *OUT_DTYPES)
    check_dtype(name, "codes", codes, torch.uint8)
    check_dtype(name, "scale", scale, torch.float32)
    if x.dim() != 2 or codes.dim() != 2 or x.shape[1] > codes.shape[1]:
        fail(
            name, "x", f"shape {tuple(x.shape)}", f"[M, K], K at most the {codes.shape[-1]} columns of codes"
        )
    if activations not in FP8_UNITS:
        fail(name, "activations", repr(activations), f"one of {', '.join(FP8_UNITS)}")
    rows, columns = codes.shape
    if rows % 16 or columns % 16 or not codes.is_contiguous():
        found = f"shape {tuple(codes.shape)}, strides {tuple(codes.stride())}"
        fail(name, "codes", found, "rows and columns in 16s, dense")
    if (
        not parts
        or len(parts) != len(starts)
        or min(*parts, *starts) < 0
        or any(s + n > rows for n, s in zip(parts, starts, strict=True))
    ):
        need = f"one part or more, within {rows} rows, and no negative number"
        fail(name, "parts", f"parts {list(parts)}, starts {list(starts)}", need)
    if activations == "group":
        check_shape(name, "scale", scale, (-(-(starts[-1] + parts[-1]) // GROUP), -(-x.shape[1] // GROUP)))
    else:
        check_shape(name, "scale", scale, (rows, 1) if scale.dim() == 2 else (len(parts),))
        if not packed(parts, starts):
            fail(name, "starts", list(starts), "parts one after the other, or scales for 128x128 blocks")
    check_same_device(name, x=x, codes=codes, scale=scale)
    check_bias(name, bias, sum(parts), x.dtype, x=x)


def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    activations: str,
    power_of_two: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], sum(parts))


@operator(
    "Tensor x, Tensor codes, Tensor scale, Tensor? bias, int[] parts, int[] starts, str activations, "
    "bool power_of_two",
    _check,
    fake=_fake,
    returns="Tensor",
)
def scaled_mm_fp8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    activations: str,
    power_of_two: bool,
) -> Tensor:
    """`Q(x) @ W.T + bias` into a new contiguous [M, N] of the dtype of x.

    Args:
        x: [M, K], bfloat16, float16 or float32.
        codes, scale: of the weight as `fp8` stores them: scale [P], [R, 1], or a row for each 128 rows of codes.
        bias: [N], dtype of x, or None.
        parts, starts: rows of each part, and its first row in codes.
        activations: "group" for 128x128 blocks, else "tensor" or "token".
        power_of_two: for the scales of x.
    """
    if not len(x):
        return x.new_empty(0, sum(parts))
    few = activations != "group" and not _single(x, scale, activations) and x.shape[0] <= FEW_ROWS
    ours = has_kernel(x, scale, activations)
    if ours or few:
        a, s = quantize_fp8(widened(x, codes.shape[1]), activations, power_of_two)
        if ours:
            return by_codes(a, s, codes, scale, bias, parts, starts, activations, x.dtype)
        return few_rows(a, s, codes, scale, bias, parts, x.dtype)
    operands = operands_fp8(x, codes, scale, parts, activations, power_of_two)
    # In the product a bias is added before the one rounding; cuBLAS takes it for whole rows of 16-bit outputs, and
    # reads it as if it were dense.
    if bias is not None and x.dtype != torch.float32 and packed(parts, starts):
        missing = codes.shape[0] - len(bias)
        inside = functional.pad(bias, (0, missing)) if missing else bias.contiguous()
        return logical(multiply(operands, inside, x.dtype), x.shape[0], parts, starts)
    y = logical(multiply(operands, None, x.dtype), x.shape[0], parts, starts)
    return y if bias is None else y.add_(bias)


def path(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """The operator for a layer's weight: [..., K] to [..., N]."""
    y = torch.ops.olq.scaled_mm_fp8(
        weight.matrix(x.detach()),
        weight.tensors[""],
        weight.tensors["_scale"],
        None if bias is None else bias.detach(),
        list(weight.parts),
        list(weight.starts),
        weight.activations,
        weight.params.scale == "power_of_two",
    )
    return y.view(*x.shape[:-1], weight.rows)
