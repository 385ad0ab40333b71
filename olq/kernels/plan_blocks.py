"""Launches for `quantize_mxfp8_`, `nvfp4_tensor_scale_` and `quantize_nvfp4_`."""

import torch
from torch import Tensor

from olq.formats import MXFP8_BLOCK, exponent_rule
from olq.kernels import tiles
from olq.kernels.shapes import (
    SCRATCH,
    Launch,
    Plan,
    cover,
    is_tall,
    magnitudes_of,
    matrices_of,
    place_of,
    reading_of,
    strides_of,
    tiling_of,
)


def quantize_mxfp8(
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
) -> Plan | str:
    """For `olq.numerics.mxfp8.quantize_`, whose arguments these are."""
    shape = matrices_of(source, codes, scale)
    if isinstance(shape, str):
        return shape
    tile = cover(tiles.groups(shape.k, MXFP8_BLOCK, is_tall(source), tiled=scale_layout != "linear"), shape.n)
    across = -(-shape.k // tile.columns)
    strides, swizzled = place_of(scale, scale_layout)
    one = Launch(
        "blockscaled.quantize_mxfp8",
        (0, 1, 2),
        (
            shape.n,
            shape.k,
            row,
            row_step,
            column,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], codes),
            shape.steps[2],
            *strides,
        ),
        {
            "CARRY": exponent_rule(rule).carry,
            "SWIZZLED": swizzled,
            **reading_of(source, through, saturate),
            **tiling_of(tile, shape.n, shape.k, source, codes),
        },
        (across, -(-shape.n // tile.rows), shape.matrices),
        tile.warps,
    )
    return Plan((one,))


def nvfp4_tensor_scale(
    source: Tensor, scale_2: Tensor, through: torch.dtype | None = None, saturate: bool = False
) -> Plan | str:
    """For `olq.numerics.nvfp4.tensor_scale_`, whose arguments these are."""
    shape = matrices_of(source, scale_2)
    if isinstance(shape, str):
        return shape
    first, count = magnitudes_of(shape, source, reading_of(source, through, saturate))
    second = Launch(
        "tensor.nvfp4_scale",
        (SCRATCH, 1),
        (count, shape.steps[1]),
        {"COUNT": tiles.power_of_two(count)},
        (1, 1, shape.matrices),
        4,
    )
    return Plan((first, second), count * shape.matrices)


def quantize_nvfp4(
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
) -> Plan | str:
    """For `olq.numerics.nvfp4.quantize_`, whose arguments these are."""
    shape = matrices_of(source, codes, scale, scale_2)
    if isinstance(shape, str):
        return shape
    tile = cover(tiles.nvfp4(shape.k, is_tall(source)), shape.n)
    across = -(-shape.k // tile.columns)
    strides, swizzled = place_of(scale, scale_layout)
    one = Launch(
        "blockscaled.quantize_nvfp4",
        (0, 1, 2, 3),
        (
            shape.n,
            shape.k,
            row,
            row_step,
            column,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], codes),
            shape.steps[2],
            *strides,
            shape.steps[3],
        ),
        {
            "SWIZZLED": swizzled,
            **reading_of(source, through, saturate),
            **tiling_of(tile, shape.n, shape.k, source, codes),
        },
        (across, -(-shape.n // tile.rows), shape.matrices),
        tile.warps,
    )
    return Plan((one,))
