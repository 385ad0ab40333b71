"""olq's operators, `torch.ops.olq.*`: schemas, shape rules and the device table. No arithmetic.

Each writes into storage that its caller owns, so that a first load and a reload are the same code and
addresses survive. Codes, E8M0 and E4M3 bytes are uint8 here; typed views are made at kernels. A tensor is
[*lead, n, k], where `lead` are experts' dimensions, usually none; its strides may be any. `source` may be
on another device than results.

    quantize_fp8_(source, codes!, scale!, block_rows, block_columns, power_of_two, through, saturate)
    quantize_mxfp8_(source, codes!, scale!, rule, scale_layout, row, row_step, column, through, saturate)
    nvfp4_tensor_scale_(source, scale_2!, through, saturate)
    quantize_nvfp4_(source, codes!, scale!, scale_2, scale_layout, row, row_step, column, through, saturate)
    dequantize_fp8_(codes, scale, out!, block_rows, block_columns)
    dequantize_mxfp8_(codes, scale, out!, scale_layout, row, row_step, column)
    dequantize_nvfp4_(codes, scale, scale_2, out!, scale_layout, row, row_step, column)

Meaning of every argument: the function of the same name in olq.numerics and docs/formats/.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from olq.errors import LayoutError
from olq.formats import MXFP8_BLOCK, NVFP4_BLOCK, SCALE_LAYOUTS, exponent_rule
from olq.numerics import fp8, mxfp8, nvfp4
from olq.numerics.places import Places
from olq.numerics.source import SOURCE_DTYPES

_Function = Callable[..., None]
_LIBRARY = torch.library.Library("olq", "DEF")
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = "int block_rows, int block_columns"
_PLACE = "str scale_layout, int row, int row_step, int column"
_TAIL = "ScalarType? through=None, bool saturate=False"


def _operator(arguments: str, check: _Function) -> Callable[[_Function], _Function]:
    """Declare `olq::<function name>`: the function on CPU and CUDA behind `check`, `check` alone as the fake.

    Sizes in a check may be symbolic; a comparison then becomes a guard.
    """

    def declare(function: _Function) -> _Function:
        name = function.__name__

        def checked(*args: object, **kwargs: object) -> None:
            check(*args, **kwargs)
            with torch.no_grad():
                function(*args, **kwargs)

        _LIBRARY.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, checked, device)
        torch.library.register_fake(f"olq::{name}", check, lib=_LIBRARY)
        return function

    return declare


def _fail(operator: str, argument: str, found: object, need: str) -> None:
    raise LayoutError(
        f"{operator} can't take this {argument}.",
        where=f"torch.ops.olq.{operator}, argument {argument!r}",
        found=str(found),
        need=need,
        remedy="make the storage with olq.alloc from the method's plan, or pass the matching view of it",
    )


def _shape(operator: str, argument: str, tensor: Tensor, need: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(need):
        _fail(operator, argument, f"shape {tuple(tensor.shape)}", f"shape {tuple(need)}")


def _dtype(operator: str, argument: str, tensor: Tensor, *need: torch.dtype) -> None:
    if tensor.dtype not in need:
        _fail(operator, argument, tensor.dtype, f"{' or '.join(str(dtype) for dtype in need)}")


def _source(operator: str, source: Tensor, through: torch.dtype | None) -> tuple[tuple[int, ...], int, int]:
    """Check a source; its (lead, n, k)."""
    _dtype(operator, "source", source, *SOURCE_DTYPES)
    if through is not None and through not in SOURCE_DTYPES:
        _fail(operator, "through", through, f"None or {' or '.join(str(dtype) for dtype in SOURCE_DTYPES)}")
    return _matrix(operator, "source", source)


def _matrix(operator: str, argument: str, tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    if tensor.dim() < 2:
        _fail(operator, argument, f"{tensor.dim()} dimensions", "[*lead, n, k]")
    *lead, n, k = tensor.shape
    return tuple(lead), n, k


def _blocks(operator: str, block_rows: int, block_columns: int) -> tuple[int, int]:
    if block_rows < 0 or block_columns < 0:
        _fail(operator, "block", (block_rows, block_columns), "positive, or 0 for the whole extent")
    return block_rows, block_columns


def _same_device(operator: str, **tensors: Tensor) -> None:
    (first, anchor), *rest = tensors.items()
    for argument, tensor in rest:
        if tensor.device != anchor.device:
            _fail(operator, argument, tensor.device, f"{anchor.device}, where {first!r} is")


def _places(
    operator: str,
    scale: Tensor,
    lead: tuple[int, ...],
    n: int,
    blocks: int,
    layout: str,
    place: tuple[int, int, int],
) -> None:
    """Check that n x blocks scale bytes fit where they are told to go."""
    row, row_step, column = place
    _dtype(operator, "scale", scale, torch.uint8)
    if layout not in SCALE_LAYOUTS:
        _fail(operator, "scale_layout", repr(layout), f"one of {', '.join(SCALE_LAYOUTS)}")
    if row < 0 or column < 0 or row_step < 1:
        found = f"row {row}, row_step {row_step}, column {column}"
        _fail(operator, "place", found, "row >= 0, row_step >= 1, column >= 0")
    if scale.dim() != len(lead) + 2 or tuple(scale.shape[:-2]) != tuple(lead):
        _fail(operator, "scale", f"shape {tuple(scale.shape)}", f"{(*lead, 'R', 'C')}")
    rows, columns = scale.shape[-2:]
    last_row, last_column = row + max(n - 1, 0) * row_step, column + blocks
    if n and blocks and (last_row >= rows or last_column > columns):
        need = f"at least {last_row + 1} rows and {last_column} columns"
        _fail(operator, "scale", f"shape {tuple(scale.shape)}", need)
    if layout == "swizzled_128x4":
        dense = scale.stride(-1) == 1 and scale.stride(-2) == columns
        if rows % 128 or columns % 4 or not dense:
            found = f"shape {tuple(scale.shape)}, strides {tuple(scale.stride())}"
            _fail(operator, "scale", found, "rows in 128s, columns in 4s, the last two dimensions dense")


def _check_quantize_fp8(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    power_of_two: bool,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    name = "quantize_fp8_"
    _source(name, source, through)
    block = _blocks(name, block_rows, block_columns)
    _dtype(name, "codes", codes, torch.uint8)
    _dtype(name, "scale", scale, torch.float32)
    _shape(name, "codes", codes, tuple(source.shape))
    _shape(name, "scale", scale, fp8.scale_shape(source.shape, block))
    _same_device(name, codes=codes, scale=scale)


@_operator(
    f"Tensor source, Tensor(a!) codes, Tensor(b!) scale, {_BLOCK}, bool power_of_two, {_TAIL}",
    _check_quantize_fp8,
)
def quantize_fp8_(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    power_of_two: bool,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    """See `olq.numerics.fp8.quantize_`."""
    block = (block_rows, block_columns)
    fp8.quantize_(source, codes, scale, block, power_of_two=power_of_two, through=through, saturate=saturate)


def _check_quantize_mxfp8(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    rule: str,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    name = "quantize_mxfp8_"
    lead, n, k = _source(name, source, through)
    exponent_rule(rule)
    _dtype(name, "codes", codes, torch.uint8)
    _shape(name, "codes", codes, tuple(source.shape))
    _places(name, scale, lead, n, -(-k // MXFP8_BLOCK), scale_layout, (row, row_step, column))
    _same_device(name, codes=codes, scale=scale)


@_operator(
    f"Tensor source, Tensor(a!) codes, Tensor(b!) scale, str rule, {_PLACE}, {_TAIL}", _check_quantize_mxfp8
)
def quantize_mxfp8_(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    rule: str,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    """See `olq.numerics.mxfp8.quantize_`."""
    places = Places(scale, scale_layout, row, row_step, column)
    mxfp8.quantize_(source, codes, places, rule=rule, through=through, saturate=saturate)


def _check_nvfp4_tensor_scale(
    source: Tensor, scale_2: Tensor, through: torch.dtype | None = None, saturate: bool = False
) -> None:
    name = "nvfp4_tensor_scale_"
    lead, _, _ = _source(name, source, through)
    _dtype(name, "scale_2", scale_2, torch.float32)
    _shape(name, "scale_2", scale_2, lead)


@_operator(f"Tensor source, Tensor(a!) scale_2, {_TAIL}", _check_nvfp4_tensor_scale)
def nvfp4_tensor_scale_(
    source: Tensor, scale_2: Tensor, through: torch.dtype | None = None, saturate: bool = False
) -> None:
    """See `olq.numerics.nvfp4.tensor_scale_`."""
    nvfp4.tensor_scale_(source, scale_2, through=through, saturate=saturate)


def _check_quantize_nvfp4(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    name = "quantize_nvfp4_"
    lead, n, k = _source(name, source, through)
    _dtype(name, "codes", codes, torch.uint8)
    _dtype(name, "scale_2", scale_2, torch.float32)
    _shape(name, "codes", codes, (*lead, n, -(-k // 2)))
    _shape(name, "scale_2", scale_2, lead)
    _places(name, scale, lead, n, -(-k // NVFP4_BLOCK), scale_layout, (row, row_step, column))
    _same_device(name, codes=codes, scale=scale, scale_2=scale_2)


@_operator(
    f"Tensor source, Tensor(a!) codes, Tensor(b!) scale, Tensor scale_2, {_PLACE}, {_TAIL}",
    _check_quantize_nvfp4,
)
def quantize_nvfp4_(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> None:
    """See `olq.numerics.nvfp4.quantize_`."""
    places = Places(scale, scale_layout, row, row_step, column)
    nvfp4.quantize_(source, codes, places, scale_2, through=through, saturate=saturate)


def _check_dequantize_fp8(
    codes: Tensor, scale: Tensor, out: Tensor, block_rows: int, block_columns: int
) -> None:
    name = "dequantize_fp8_"
    _matrix(name, "codes", codes)
    block = _blocks(name, block_rows, block_columns)
    _dtype(name, "codes", codes, torch.uint8)
    _dtype(name, "scale", scale, torch.float32)
    _dtype(name, "out", out, *_OUT_DTYPES)
    _shape(name, "out", out, tuple(codes.shape))
    _shape(name, "scale", scale, fp8.scale_shape(codes.shape, block))
    _same_device(name, codes=codes, scale=scale, out=out)


@_operator(f"Tensor codes, Tensor scale, Tensor(a!) out, {_BLOCK}", _check_dequantize_fp8)
def dequantize_fp8_(codes: Tensor, scale: Tensor, out: Tensor, block_rows: int, block_columns: int) -> None:
    """See `olq.numerics.fp8.dequantize_`."""
    fp8.dequantize_(codes, scale, out, (block_rows, block_columns))


def _check_dequantize_mxfp8(
    codes: Tensor, scale: Tensor, out: Tensor, scale_layout: str, row: int, row_step: int, column: int
) -> None:
    name = "dequantize_mxfp8_"
    lead, n, k = _matrix(name, "codes", codes)
    _dtype(name, "codes", codes, torch.uint8)
    _dtype(name, "out", out, *_OUT_DTYPES)
    _shape(name, "out", out, tuple(codes.shape))
    _places(name, scale, lead, n, -(-k // MXFP8_BLOCK), scale_layout, (row, row_step, column))
    _same_device(name, codes=codes, scale=scale, out=out)


@_operator(f"Tensor codes, Tensor scale, Tensor(a!) out, {_PLACE}", _check_dequantize_mxfp8)
def dequantize_mxfp8_(
    codes: Tensor, scale: Tensor, out: Tensor, scale_layout: str, row: int, row_step: int, column: int
) -> None:
    """See `olq.numerics.mxfp8.dequantize_`."""
    mxfp8.dequantize_(codes, Places(scale, scale_layout, row, row_step, column), out)


def _check_dequantize_nvfp4(
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    out: Tensor,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
) -> None:
    name = "dequantize_nvfp4_"
    lead, n, k = _matrix(name, "out", out)
    _dtype(name, "codes", codes, torch.uint8)
    _dtype(name, "scale_2", scale_2, torch.float32)
    _dtype(name, "out", out, *_OUT_DTYPES)
    _shape(name, "codes", codes, (*lead, n, -(-k // 2)))
    _shape(name, "scale_2", scale_2, lead)
    _places(name, scale, lead, n, -(-k // NVFP4_BLOCK), scale_layout, (row, row_step, column))
    _same_device(name, codes=codes, scale=scale, scale_2=scale_2, out=out)


@_operator(f"Tensor codes, Tensor scale, Tensor scale_2, Tensor(a!) out, {_PLACE}", _check_dequantize_nvfp4)
def dequantize_nvfp4_(
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    out: Tensor,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
) -> None:
    """See `olq.numerics.nvfp4.dequantize_`."""
    nvfp4.dequantize_(codes, Places(scale, scale_layout, row, row_step, column), scale_2, out)
