"""Products with quantized weights, weight-only: `x @ W.T + bias`. No arithmetic.

    matmul_fp8(x, codes, scale, bias, parts, starts, block_rows, block_columns) -> y
    matmul_mxfp8(x, codes, scale, bias, parts, starts, scale_layout) -> y
    matmul_nvfp4(x, codes, scale, scale_2, bias, parts, starts, scale_layout) -> y

Value     y[m, j] = sum over k of x[m, k] * w[j, k], + bias[j]: products summed in float32, one rounding to x's dtype at
          the end. w is what `dequantize_*_` decodes into float32, on some paths rounded to x's dtype; kernels keep
          the float32 scales of fp8 and of nvfp4's tensors for the sum, and round none of their weights. Sums
          for fp8 are of x times codes, up to 448: bfloat16 x from 2**119 / K on may overflow where x times w would not
Letters   M, K = rows and columns of x; parts = rows of each part of a fused weight, N = their sum; R, C = rows and
          columns of the kernel format. Row r of part p is row starts[p] + r of codes and scales, and column
          sum(parts[:p]) + r of y; what lies between parts, and beyond K, is padding that nobody reads.
Kernels   on CUDA as `olq.kernels.path` says; what has none is decoded in bands of rows, which torch multiplies as it is
          set: torch.backends.cuda.matmul may allow it TF32, or parts of a sum in 16 bits, which is its default.
Memory    y; of `olq.kernels.linear_wide` up to 16 float32 for each element of y; of bands `BAND_BYTES` or more

    x       bfloat16, float16 or float32 [M, K], any strides. Its gradient is not computed.
    codes   uint8 [R, C], E4M3, C >= K; nvfp4: [R, C / 2], two E2M1 codes a byte, low nibble first
    scale   decode scales. fp8: float32, [P] for block (0, 0), else [rows, ceil(K / block_columns)], where a row of
            scales is for one part (block_rows 0) or block_rows rows of codes; mxfp8, nvfp4: uint8, as methods store it
    scale_2 float32 [P], decode scales
    bias    dtype of x, [N], or None
    y       dtype of x, [M, N], contiguous, new
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from olq.formats import MXFP8_BLOCK, NVFP4_BLOCK
from olq.ops.declare import (
    OUT_DTYPES,
    check_bias,
    check_blocks,
    check_dtype,
    check_places,
    check_same_device,
    check_shape,
    fail,
    operator,
)

BAND_BYTES = 32 << 20
"""What the decoded rows of one band may take, unless rows that share a scale take more: near what an H200 caches."""

_HEAD = "Tensor x, Tensor codes, Tensor scale"
_TAIL = "Tensor? bias, int[] parts, int[] starts"
_Decode = Callable[[Tensor, int, int, int], None]


# -- checks -------------------------------------------------------------------------------------------------


def _check(
    name: str,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    codes_a_byte: int = 1,
) -> None:
    """What the three share."""
    check_dtype(name, "x", x, *OUT_DTYPES)
    check_rows_of_codes(name, x, codes, parts, starts, codes_a_byte)
    check_same_device(name, x=x, codes=codes, scale=scale)
    check_bias(name, bias, sum(parts), x.dtype, x=x)


def check_rows_of_codes(
    name: str, x: Tensor, codes: Tensor, parts: Sequence[int], starts: Sequence[int], codes_a_byte: int = 1
) -> None:
    """That codes are bytes, have the columns of x, and rows where the parts are."""
    check_dtype(name, "codes", codes, torch.uint8)
    for argument, tensor in (("x", x), ("codes", codes)):
        if tensor.dim() != 2:
            fail(name, argument, f"shape {tuple(tensor.shape)}", "two dimensions")
    columns = -(-x.shape[1] // codes_a_byte)
    if codes.shape[1] < columns:
        need = f"at least {columns} columns, for the {x.shape[1]} of x"
        fail(name, "codes", f"shape {tuple(codes.shape)}", need)
    if len(parts) != len(starts) or min(parts, default=0) < 0:
        need = "as many starts as parts, and no negative number of rows"
        fail(name, "parts", f"parts {list(parts)}, starts {list(starts)}", need)
    for rows, start in zip(parts, starts, strict=True):
        if start < 0 or start + rows > codes.shape[0]:
            found = f"start {start} of a part of {rows} rows"
            fail(name, "starts", found, f"parts within the {codes.shape[0]} rows of codes")


def _fake(x: Tensor, parts: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], sum(parts))


def _fake_8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, parts: Sequence[int], *rest: object
) -> Tensor:
    return _fake(x, parts)


def _fake_4(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    *rest: object,
) -> Tensor:
    return _fake(x, parts)


def _making(fake: Callable[..., Tensor]) -> Callable[..., tuple[Tensor]]:
    return lambda *args: (fake(*args),)


# -- without a kernel ---------------------------------------------------------------------------------------


def _multiply(
    out: Tensor,
    x: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    together: int,
    decode: _Decode,
) -> None:
    """Decode bands of rows and let torch multiply them.

    Args:
        out: [M, N], written.
        x, bias, parts, starts: the operator's.
        together: rows that share scales stay in one band.
        decode: given a band [rows, K] of x's dtype to write, its part, and its first and last + 1 kernel row.
    """
    k = x.shape[1]
    height = band_rows(k, x.element_size(), together)
    memory = x.new_empty(min(height, max(parts, default=0)), k)
    column = 0
    for part, (rows, start) in enumerate(zip(parts, starts, strict=True)):
        for first in range(0, rows, height):
            count = min(height, rows - first)
            w, there = memory[:count], slice(column, column + count)
            decode(w, part, start + first, start + first + count)
            _product(x, w, None if bias is None else bias[there], out[:, there])
            column += count


def band_rows(k: int, element_size: int, together: int) -> int:
    """Rows of a band: as many as `BAND_BYTES` holds, a multiple of `together`."""
    together = max(together, 1)
    return max(BAND_BYTES // (element_size * max(k, 1)) // together * together, together)


def _product(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if not x.is_cuda:
        out.copy_(functional.linear(x, w, bias))
    elif bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


# -- operators ----------------------------------------------------------------------------------------------


def _check_fp8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    block_rows: int,
    block_columns: int,
) -> None:
    name = "matmul_fp8"
    _check(name, x, codes, scale, bias, parts, starts)
    check_scale_fp8(name, x, scale, parts, starts, block_rows, block_columns)


def check_scale_fp8(
    name: str,
    x: Tensor,
    scale: Tensor,
    parts: Sequence[int],
    starts: Sequence[int],
    block_rows: int,
    block_columns: int,
) -> None:
    """That there is a float32 scale for each unit of the parts."""
    check_blocks(name, block_rows, block_columns)
    check_dtype(name, "scale", scale, torch.float32)
    if not (block_rows or block_columns):
        check_shape(name, "scale", scale, (len(parts),))
        return
    last = max((s + n for s, n in zip(starts, parts, strict=True) if n), default=0)
    down = -(-last // block_rows) if block_rows else len(parts)
    across = -(-x.shape[1] // block_columns) if block_columns else 1
    if scale.dim() != 2 or scale.shape[0] < down or scale.shape[1] < across:
        fail(name, "scale", f"shape {tuple(scale.shape)}", f"at least {down} rows and {across} columns")
    if block_rows and any(start % block_rows for start in starts):
        fail(name, "starts", list(starts), f"multiples of {block_rows}, the rows of a block")


@operator(
    f"{_HEAD}, {_TAIL}, int block_rows, int block_columns",
    _check_fp8,
    fake=_fake_8,
    make=_making(_fake_8),
    returns="Tensor",
    kernel=True,
)
def matmul_fp8(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    block_rows: int,
    block_columns: int,
) -> None:
    """`x @ W.T + bias` for E4M3 codes with float32 scales; decoded as by `dequantize_fp8_`."""
    k = x.shape[1]
    across = -(-k // block_columns) if block_columns else 1

    def decode(w: Tensor, part: int, first: int, stop: int) -> None:
        span = (first // block_rows, -(-stop // block_rows)) if block_rows else (part, part + 1)
        rows = slice(*span)
        grid = scale[rows] if scale.dim() == 2 else scale[rows, None]
        torch.ops.olq.dequantize_fp8_(codes[first:stop, :k], grid[:, :across], w, block_rows, block_columns)

    _multiply(out, x, bias, parts, starts, block_rows, decode)


def _check_mxfp8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    scale_layout: str = "linear",
) -> None:
    name = "matmul_mxfp8"
    _check(name, x, codes, scale, bias, parts, starts)
    for rows, start in zip(parts, starts, strict=True):
        blocks = -(-x.shape[1] // MXFP8_BLOCK)
        check_places(name, scale, (), rows, blocks, scale_layout, (start, 1, 0))


@operator(
    f'{_HEAD}, {_TAIL}, str scale_layout="linear"',
    _check_mxfp8,
    fake=_fake_8,
    make=_making(_fake_8),
    returns="Tensor",
    kernel=True,
)
def matmul_mxfp8(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    scale_layout: str = "linear",
) -> None:
    """`x @ W.T + bias` for E4M3 codes with E8M0 bytes; decoded as by `dequantize_mxfp8_`."""
    k = x.shape[1]

    def decode(w: Tensor, part: int, first: int, stop: int) -> None:
        torch.ops.olq.dequantize_mxfp8_(codes[first:stop, :k], scale, w, scale_layout, first, 1, 0)

    _multiply(out, x, bias, parts, starts, 1, decode)


def _check_nvfp4(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    scale_layout: str = "linear",
) -> None:
    name = "matmul_nvfp4"
    _check(name, x, codes, scale, bias, parts, starts, codes_a_byte=2)
    check_dtype(name, "scale_2", scale_2, torch.float32)
    check_shape(name, "scale_2", scale_2, (len(parts),))
    check_same_device(name, x=x, scale_2=scale_2)
    for rows, start in zip(parts, starts, strict=True):
        blocks = -(-x.shape[1] // NVFP4_BLOCK)
        check_places(name, scale, (), rows, blocks, scale_layout, (start, 1, 0))


@operator(
    f'{_HEAD}, Tensor scale_2, {_TAIL}, str scale_layout="linear"',
    _check_nvfp4,
    fake=_fake_4,
    make=_making(_fake_4),
    returns="Tensor",
    kernel=True,
)
def matmul_nvfp4(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    scale_layout: str = "linear",
) -> None:
    """`x @ W.T + bias` for E2M1 codes with E4M3 bytes and float32 scales; decoded as by `dequantize_nvfp4_`."""
    k = x.shape[1]

    def decode(w: Tensor, part: int, first: int, stop: int) -> None:
        packed = codes[first:stop, : -(-k // 2)]
        torch.ops.olq.dequantize_nvfp4_(packed, scale, scale_2[part], w, scale_layout, first, 1, 0)

    _multiply(out, x, bias, parts, starts, 1, decode)
