"""Launches for `quantize_fp8_`: which kernel a unit takes."""

import torch
from torch import Tensor

from olq.kernels import plan_tensor, tiles
from olq.kernels.shapes import (
    Launch,
    Matrices,
    Plan,
    cover,
    is_tall,
    matrices_of,
    reading_of,
    strides_of,
    tiling_of,
    wide,
)
from olq.kernels.tiles import Tile


def quantize_fp8(
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    power_of_two: bool,
    through: torch.dtype | None = None,
    saturate: bool = False,
) -> Plan | str:
    """For `olq.numerics.fp8.quantize_`, whose arguments these are."""
    shape = matrices_of(source, codes, scale)
    if isinstance(shape, str):
        return shape
    n, k = shape.n, shape.k
    # A unit no larger than the matrix: the last one of a block grid may be cut, a whole extent is one.
    rows, columns = min(block_rows or n, n), min(block_columns or k, k)
    constants: dict[str, object] = {"POWER": bool(power_of_two), **reading_of(source, through, saturate)}
    if columns == k and rows == 1:
        return _fp8_rows(shape, source, codes, scale, constants)
    if rows == 1 and columns & (columns - 1) == 0 and 16 <= columns <= tiles.UNIT_ELEMENTS // 4:
        return _fp8_groups(shape, source, codes, scale, columns, constants)
    if tiles.power_of_two(rows) * max(tiles.power_of_two(columns), 16) <= tiles.UNIT_ELEMENTS:
        return _fp8_blocks(shape, source, codes, scale, (rows, columns), constants)
    if (rows, columns) == (n, k):
        return plan_tensor.one_scale(shape, source, codes, scale, constants)
    return f"a unit of {rows} x {columns} is neither a row, nor the whole matrix, nor fits in one program"


def _fp8_rows(
    shape: Matrices, source: Tensor, codes: Tensor, scale: Tensor, constants: dict[str, object]
) -> Plan:
    tile = tiles.whole_rows(shape.k, is_tall(source))
    once = tile.columns >= shape.k
    one = Launch(
        "fp8.quantize_rows",
        (0, 1, 2),
        (
            shape.n,
            shape.k,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], codes),
            shape.steps[2],
            scale.stride(-2),
        ),
        {**constants, "ONCE": once, **tiling_of(tile, shape.n, shape.k, source, codes)},
        (-(-shape.n // tile.rows), 1, shape.matrices),
        tile.warps,
        _registers(tile, shape.steps, source, codes) if once else {},
    )
    return Plan((one,))


def _registers(tile: Tile, steps: tuple[int, ...], source: Tensor, codes: Tensor) -> dict[str, int]:
    """How many a thread gets, where that is known to be enough.

    It is for 16 neighbours in memory a thread, read and written many at a time: then a thread has one address of each
    tensor. Elements that the compiler can't see as such take an address each.
    """
    few = tile.rows * tile.columns == 512 * tile.warps and source.element_size() == 2
    together = all(
        t.stride(-1) == 1 and not (t.stride(-2) | t.shape[-1] | step | t.data_ptr()) & 15
        for t, step in zip((source, codes), steps, strict=False)
    )
    narrow = not wide(tile, source, codes)
    return {"maxnreg": tiles.ROW_REGISTERS} if few and together and narrow else {}


def _fp8_groups(
    shape: Matrices, source: Tensor, codes: Tensor, scale: Tensor, group: int, constants: dict[str, object]
) -> Plan:
    tile = cover(tiles.groups(shape.k, group, is_tall(source)), shape.n)
    across = -(-shape.k // tile.columns)
    one = Launch(
        "fp8.quantize_groups",
        (0, 1, 2),
        (
            shape.n,
            shape.k,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], codes),
            *strides_of(shape.steps[2], scale),
        ),
        {**constants, "GROUP": group, **tiling_of(tile, shape.n, shape.k, source, codes)},
        (across, -(-shape.n // tile.rows), shape.matrices),
        tile.warps,
    )
    return Plan((one,))


def _fp8_blocks(
    shape: Matrices,
    source: Tensor,
    codes: Tensor,
    scale: Tensor,
    unit: tuple[int, int],
    constants: dict[str, object],
) -> Plan:
    tile = tiles.unit(*unit)
    down, across = scale.shape[-2:]
    tiling = tiling_of(tile, shape.n, shape.k, source, codes)
    tiling["FULL"] = tiling["FULL"] and (tile.rows, tile.columns) == unit
    one = Launch(
        "fp8.quantize_blocks",
        (0, 1, 2),
        (
            shape.n,
            shape.k,
            *unit,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], codes),
            *strides_of(shape.steps[2], scale),
        ),
        {**constants, **tiling},
        (across, down, shape.matrices),
        tile.warps,
    )
    return Plan((one,))
