"""Launches for the operators from codes back to values."""

from torch import Tensor

from olq.kernels import tiles
from olq.kernels.shapes import Launch, Plan, cover, merge, place_of, strides_of, tiling_of


def _decode(
    kernel: str,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: dict[str, object],
    place: tuple[int, int],
) -> Plan | str:
    """One launch over tiles of `out`, the last tensor; `place` are the scales' strides."""
    codes, _, *scale_2, out = tensors
    *lead, n, k = out.shape
    shape = merge(n, k, lead, tensors)
    if isinstance(shape, str):
        return shape
    tile = cover(tiles.decode(k), n)
    across = -(-k // tile.columns)
    one = Launch(
        kernel,
        tuple(range(len(tensors))),
        (
            n,
            k,
            *numbers,
            *strides_of(shape.steps[0], codes),
            shape.steps[1],
            *place,
            *(shape.steps[2] for _ in scale_2),
            *strides_of(shape.steps[-1], out),
        ),
        {**constants, **tiling_of(tile, n, k, codes, out)},
        (across, -(-n // tile.rows), shape.matrices),
        tile.warps,
    )
    return Plan((one,))


def dequantize_fp8(
    codes: Tensor, scale: Tensor, out: Tensor, block_rows: int, block_columns: int
) -> Plan | str:
    """For `olq.numerics.fp8.dequantize_`, whose arguments these are."""
    n, k = max(out.shape[-2], 1), max(out.shape[-1], 1)
    width = tiles.decode(k).columns
    columns = block_columns or k
    # The largest power of two that divides the unit, if units are not wider than the tile.
    group = width if columns >= k else min(columns & -columns, width)
    return _decode(
        "decode.dequantize_fp8",
        (codes, scale, out),
        (block_rows or n, columns),
        {"GROUP": group},
        (scale.stride(-2), scale.stride(-1)),
    )


def dequantize_mxfp8(
    codes: Tensor, scale: Tensor, out: Tensor, scale_layout: str, row: int, row_step: int, column: int
) -> Plan | str:
    """For `olq.numerics.mxfp8.dequantize_`, whose arguments these are."""
    place, swizzled = place_of(scale, scale_layout)
    constants: dict[str, object] = {"SWIZZLED": swizzled}
    return _decode("decode.dequantize_mxfp8", (codes, scale, out), (row, row_step, column), constants, place)


def dequantize_nvfp4(
    codes: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    out: Tensor,
    scale_layout: str,
    row: int,
    row_step: int,
    column: int,
) -> Plan | str:
    """For `olq.numerics.nvfp4.dequantize_`, whose arguments these are."""
    place, swizzled = place_of(scale, scale_layout)
    constants: dict[str, object] = {"SWIZZLED": swizzled}
    numbers = (row, row_step, column)
    return _decode("decode.dequantize_nvfp4", (codes, scale, scale_2, out), numbers, constants, place)
