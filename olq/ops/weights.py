"""Operators for weights: schemas, shape rules and the device table. No arithmetic. On CUDA: olq.kernels, where
`olq.kernels.path` says so.

Meaning of every argument: the function of the same name in olq.numerics and docs/formats/.
"""

import torch
from torch import Tensor

from olq.formats import MXFP8_BLOCK, NVFP4_BLOCK, exponent_rule
from olq.numerics import fp8, mxfp8, nvfp4
from olq.numerics.places import Places
from olq.ops.declare import (
    BLOCK,
    OUT_DTYPES,
    PLACE,
    TAIL,
    check_blocks,
    check_dtype,
    check_matrix,
    check_places,
    check_same_device,
    check_shape,
    check_source,
    operator,
)


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
    check_source(name, source, through)
    block = check_blocks(name, block_rows, block_columns)
    check_dtype(name, "codes", codes, torch.uint8)
    check_dtype(name, "scale", scale, torch.float32)
    check_shape(name, "codes", codes, tuple(source.shape))
    check_shape(name, "scale", scale, fp8.scale_shape(source.shape, block))
    check_same_device(name, codes=codes, scale=scale)


@operator(
    f"Tensor source, Tensor(a!) codes, Tensor(b!) scale, {BLOCK}, bool power_of_two, {TAIL}",
    _check_quantize_fp8,
    kernel=True,
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
    lead, n, k = check_source(name, source, through)
    exponent_rule(rule)
    check_dtype(name, "codes", codes, torch.uint8)
    check_shape(name, "codes", codes, tuple(source.shape))
    check_places(name, scale, lead, n, -(-k // MXFP8_BLOCK), scale_layout, (row, row_step, column))
    check_same_device(name, codes=codes, scale=scale)


@operator(
    f"Tensor source, Tensor(a!) codes, Tensor(b!) scale, str rule, {PLACE}, {TAIL}",
    _check_quantize_mxfp8,
    kernel=True,
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
    lead, _, _ = check_source(name, source, through)
    check_dtype(name, "scale_2", scale_2, torch.float32)
    check_shape(name, "scale_2", scale_2, lead)


@operator(f"Tensor source, Tensor(a!) scale_2, {TAIL}", _check_nvfp4_tensor_scale, kernel=True)
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
    lead, n, k = check_source(name, source, through)
    check_dtype(name, "codes", codes, torch.uint8)
    check_dtype(name, "scale_2", scale_2, torch.float32)
    check_shape(name, "codes", codes, (*lead, n, -(-k // 2)))
    check_shape(name, "scale_2", scale_2, lead)
    check_places(name, scale, lead, n, -(-k // NVFP4_BLOCK), scale_layout, (row, row_step, column))
    check_same_device(name, codes=codes, scale=scale, scale_2=scale_2)


@operator(
    f"Tensor source, Tensor(a!) codes, Tensor(b!) scale, Tensor scale_2, {PLACE}, {TAIL}",
    _check_quantize_nvfp4,
    kernel=True,
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
    check_matrix(name, "codes", codes)
    block = check_blocks(name, block_rows, block_columns)
    check_dtype(name, "codes", codes, torch.uint8)
    check_dtype(name, "scale", scale, torch.float32)
    check_dtype(name, "out", out, *OUT_DTYPES)
    check_shape(name, "out", out, tuple(codes.shape))
    check_shape(name, "scale", scale, fp8.scale_shape(codes.shape, block))
    check_same_device(name, codes=codes, scale=scale, out=out)


@operator(f"Tensor codes, Tensor scale, Tensor(a!) out, {BLOCK}", _check_dequantize_fp8, kernel=True)
def dequantize_fp8_(codes: Tensor, scale: Tensor, out: Tensor, block_rows: int, block_columns: int) -> None:
    """See `olq.numerics.fp8.dequantize_`."""
    fp8.dequantize_(codes, scale, out, (block_rows, block_columns))


def _check_dequantize_mxfp8(
    codes: Tensor, scale: Tensor, out: Tensor, scale_layout: str, row: int, row_step: int, column: int
) -> None:
    name = "dequantize_mxfp8_"
    lead, n, k = check_matrix(name, "codes", codes)
    check_dtype(name, "codes", codes, torch.uint8)
    check_dtype(name, "out", out, *OUT_DTYPES)
    check_shape(name, "out", out, tuple(codes.shape))
    check_places(name, scale, lead, n, -(-k // MXFP8_BLOCK), scale_layout, (row, row_step, column))
    check_same_device(name, codes=codes, scale=scale, out=out)


@operator(f"Tensor codes, Tensor scale, Tensor(a!) out, {PLACE}", _check_dequantize_mxfp8, kernel=True)
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
    lead, n, k = check_matrix(name, "out", out)
    check_dtype(name, "codes", codes, torch.uint8)
    check_dtype(name, "scale_2", scale_2, torch.float32)
    check_dtype(name, "out", out, *OUT_DTYPES)
    check_shape(name, "codes", codes, (*lead, n, -(-k // 2)))
    check_shape(name, "scale_2", scale_2, lead)
    check_places(name, scale, lead, n, -(-k // NVFP4_BLOCK), scale_layout, (row, row_step, column))
    check_same_device(name, codes=codes, scale=scale, scale_2=scale_2, out=out)


@operator(
    f"Tensor codes, Tensor scale, Tensor scale_2, Tensor(a!) out, {PLACE}",
    _check_dequantize_nvfp4,
    kernel=True,
)
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
