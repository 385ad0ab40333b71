"""Launches for `quantize_mxfp8_`, `nvfp4_tensor_scale_` and `quantize_nvfp4_`."""

import torch
from torch import Tensor

from olq.formats import MXFP8_BLOCK, NVFP4_BLOCK, exponent_rule
from olq.kernels import tiles
from olq.kernels.shapes import (
    SCRATCH,
    Launch,
    Matrices,
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
from olq.kernels.tiles import Tile


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
    *,
    padded: bool = False,
) -> Plan | str:
    """For `olq.numerics.mxfp8.quantize_`, whose arguments these are. `padded`: see `_room`."""
    shape = matrices_of(source, codes, scale)
    if isinstance(shape, str):
        return shape
    down, wide, padded = _room(shape, MXFP8_BLOCK, padded)
    tile = cover(tiles.groups(shape.k, MXFP8_BLOCK, is_tall(source), tiled=scale_layout != "linear"), down)
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
            "PADDED": padded,
            **reading_of(source, through, saturate),
            **_tiling(tile, shape, padded, source, codes),
        },
        (-(-wide // tile.columns), -(-down // tile.rows), shape.matrices),
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
        waits=True,
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
    *,
    padded: bool = False,
) -> Plan | str:
    """For `olq.numerics.nvfp4.quantize_`, whose arguments these are. `padded`: see `_room`."""
    shape = matrices_of(source, codes, scale, scale_2)
    if isinstance(shape, str):
        return shape
    down, wide, padded = _room(shape, NVFP4_BLOCK, padded)
    tile = cover(tiles.nvfp4(shape.k, is_tall(source)), down)
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
            "PADDED": padded,
            **reading_of(source, through, saturate),
            **_tiling(tile, shape, padded, source, codes),
        },
        (-(-wide // tile.columns), -(-down // tile.rows), shape.matrices),
        tile.warps,
        waits=True,  # most often for the scale of the whole matrix
    )
    return Plan((one,))


def _room(shape: Matrices, block: int, padded: bool) -> tuple[int, int, bool]:
    """Rows and columns that programs have to cover, and whether any of them is padding.

    `padded` asks for what fills the scales up to 128 rows and 4 blocks.
    """
    if not padded:
        return shape.n, shape.k, False
    rows, columns = -(-shape.n // 128) * 128, -(-shape.k // (4 * block)) * 4 * block
    blocks = -(-shape.k // block)
    return rows, columns, rows != shape.n or blocks % 4 != 0


def _tiling(tile: Tile, shape: Matrices, padded: bool, *tensors: Tensor) -> dict[str, object]:
    tiling = tiling_of(tile, shape.n, shape.k, *tensors)
    return {**tiling, "FULL": tiling["FULL"] and not padded}
