"""Launches for the operators for activations. Those that make their outputs get them as the first arguments."""

import math
import struct
from dataclasses import replace

import torch
from torch import Tensor

from olq.kernels import tiles
from olq.kernels.plan_blocks import quantize_mxfp8 as blocks_of_mxfp8
from olq.kernels.plan_blocks import quantize_nvfp4 as blocks_of_nvfp4
from olq.kernels.plan_fp8 import quantize_fp8
from olq.kernels.shapes import (
    GRID,
    SCRATCH,
    Launch,
    Matrices,
    Plan,
    is_tall,
    matrices_of,
    reading_of,
    strides_of,
    wide,
)
from olq.kernels.tiles import Tile

_PROGRAMS = 264
"""Two for each of an H200's multiprocessors: below, a tile is better split into rows."""

_LEAST = 128
"""Elements of a tile: four for each thread of a warp, as instructions that convert four at a time need them."""


def quantize_fp8_token(codes: Tensor, scale: Tensor, x: Tensor, power_of_two: bool = False) -> Plan | str:
    """For `olq.activations.quantize_fp8_token`."""
    return _outputs_first(quantize_fp8(x, codes, scale, 1, 0, power_of_two))


def quantize_fp8_group(
    codes: Tensor,
    scale: Tensor,
    x: Tensor,
    scale_layout: str = "row_major",
    group: int = 128,
    power_of_two: bool = False,
) -> Plan | str:
    """For `olq.activations.quantize_fp8_group`."""
    if scale_layout == "row_major" and group & (group - 1) == 0 and group >= 16:
        return _outputs_first(quantize_fp8(x, codes, scale, 1, group, power_of_two))
    form: dict[str, object] = {**_PLAIN, "POWER": bool(power_of_two)}
    return _groups((x, x, codes, scale), (2, 2, 0, 1), group, form, _stored_rows(scale_layout, x))


def quantize_mxfp8(
    codes: Tensor, scale: Tensor, x: Tensor, scale_layout: str = "linear", rule: str = "RCEIL"
) -> Plan | str:
    """For `olq.activations.quantize_mxfp8`."""
    padded = scale_layout != "linear"
    return _outputs_first(blocks_of_mxfp8(x, codes, scale, rule, scale_layout, 0, 1, 0, padded=padded))


def quantize_nvfp4(
    codes: Tensor, scale: Tensor, x: Tensor, scale_2: Tensor, scale_layout: str = "linear"
) -> Plan | str:
    """For `olq.activations.quantize_nvfp4`."""
    padded = scale_layout != "linear"
    return _outputs_first(blocks_of_nvfp4(x, codes, scale, scale_2, scale_layout, 0, 1, 0, padded=padded))


def silu_mul_quantize_fp8(
    codes: Tensor,
    scale: Tensor,
    gate: Tensor,
    up: Tensor,
    scale_layout: str = "ue8m0_words",
    group: int = 128,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> Plan | str:
    """For `olq.activations.silu_mul_quantize_fp8`."""
    form = _gated(power_of_two, limit, alpha, beta, through)
    if isinstance(form, str):
        return form
    return _groups((gate, up, codes, scale), (2, 3, 0, 1), group, form, _stored_rows(scale_layout, gate))


def quantize_fp8_words(source: Tensor, codes: Tensor, words: Tensor, group: int = 128) -> Plan | str:
    """For `olq.numerics.activations.quantize_words_`, whose arguments these are."""
    return _groups((source, source, codes, words), (0, 0, 1, 2), group, _PLAIN, source.shape[-2])


def silu_mul_quantize_fp8_into(
    gate: Tensor,
    up: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int = 128,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> Plan | str:
    """For `olq.numerics.activations.silu_mul_quantize_`, whose arguments these are."""
    form = _gated(power_of_two, limit, alpha, beta, through)
    if isinstance(form, str):
        return form
    return _groups((gate, up, codes, scale), (0, 1, 2, 3), group, form, gate.shape[-2])


_PLAIN: dict[str, object] = {
    "GATED": False,
    "LIMIT": 0.0,
    "ALPHA": 1.0,
    "BETA": 0.0,
    "ADDS": False,
    "THROUGH": "",
    "POWER": True,
}


def _gated(
    power_of_two: bool, limit: float | None, alpha: float, beta: float, through: torch.dtype | None
) -> dict[str, object] | str:
    """What the kernel is compiled for; numbers as float32."""
    numbers = []
    for name, number in (("limit", limit), ("alpha", alpha), ("beta", beta)):
        rounded = _float32(number or 0.0)
        if math.isinf(rounded) or (name == "limit" and number and not rounded):
            return f"{name}={number} is no float32"
        numbers.append(rounded)
    return {
        "GATED": True,
        "LIMIT": numbers[0],
        "ALPHA": numbers[1],
        "BETA": numbers[2],
        "ADDS": beta != 0.0,
        "THROUGH": reading_of(torch.empty(0, dtype=torch.float32, device="meta"), through, False)["THROUGH"],
        "POWER": bool(power_of_two),
    }


def _float32(number: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return math.inf


def _groups(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    operands: tuple[int, int, int, int],
    group: int,
    form: dict[str, object],
    down: int,
) -> Plan | str:
    """One launch for (source or gate, itself or up, codes, scale); rows up to `down` have room for a scale."""
    shape = matrices_of(*tensors)
    if isinstance(shape, str):
        return shape
    source, up, codes, scale = tensors
    words = scale.dtype == torch.int32
    lanes = tiles.power_of_two(group)
    tile = _tile(shape, down, group, is_tall(source), words, gated=bool(form["GATED"]))
    units = tile.columns // lanes
    walked = replace(tile, columns=units * group)
    full = down == shape.n and shape.n % tile.rows == 0 and shape.k % (units * group) == 0
    one = Launch(
        "activations.quantize_groups",
        operands,
        (
            shape.n,
            down,
            shape.k,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], up),
            *strides_of(shape.steps[2], codes),
            *strides_of(shape.steps[3], scale),
        ),
        {
            **form,
            "POWER": form["POWER"] or words,
            "WORDS": words,
            "GROUP": group,
            "LANES": lanes,
            "SOURCE_HALF": half_of(source, shape.steps[0], group),
            "UP_HALF": half_of(up, shape.steps[1], group),
            "ROWS": tile.rows,
            "UNITS": units,
            "FULL": full and lanes == group,
            "WIDE": wide(walked, source, up, codes),
        },
        (-(-shape.k // (units * group)), -(-down // tile.rows), shape.matrices),
        tile.warps,
    )
    return Plan((one,))


def half_of(t: Tensor, step: int, group: int) -> int:
    """Which half of its words, of 32 bits, the elements of a tensor are; -1 if they are anything else.

    That is every second column of a 16-bit type, as gate and up are that take turns. Words of a tile begin at multiples
    of 16 bytes; a word's other half is in the same allocation.
    """
    if t.element_size() != 2 or t.stride(-1) != 2 or t.shape[-1] < 2 or group % 4:
        return -1
    if (t.stride(-2) % 8 and t.shape[-2] > 1) or step % 8:
        return -1
    half, rest = divmod(t.data_ptr() & 15, 2)
    return half if half <= 1 and not rest else -1


def _tile(shape: Matrices, down: int, group: int, tall: bool, words: bool, gated: bool) -> Tile:
    """A tile of whole groups, and of whole words; its columns count lanes. The gated product takes more registers."""
    lanes = tiles.power_of_two(group)
    least = 4 if words else 1
    most = max(least, (64 if tall else 1024) // lanes)
    units = max(least, min(most, tiles.power_of_two(-(-shape.k // group))))
    while units > least and units * lanes > 512 and shape.k % (units * group):
        units //= 2
    across = -(-shape.k // (units * group))
    rows = max(1, (1024 if gated and not tall else 4096) // (units * lanes))
    least_rows = max(1, _LEAST // (units * lanes))
    while rows > least_rows and across * -(-down // rows) * shape.matrices < _PROGRAMS:
        rows //= 2
    while -(-down // rows) > GRID:
        rows *= 2
    elements = rows * units * lanes
    return Tile(rows, units * lanes, min(max(elements // 1024, 1), 16))


def _stored_rows(scale_layout: str, source: Tensor) -> int:
    """Rows that the storage of the scales has: columns of column-major scales are multiples of 16 bytes."""
    rows = source.shape[-2]
    return rows if scale_layout == "row_major" else -(-rows // 4) * 4


def _outputs_first(plan: Plan | str) -> Plan | str:
    """A plan for (x, codes, scale, ...) as one for (codes, scale, x, ...)."""
    if isinstance(plan, str):
        return plan
    place = {0: 2, 1: 0, 2: 1, SCRATCH: SCRATCH}
    launches = tuple(
        replace(one, operands=tuple(place.get(i, i) for i in one.operands)) for one in plan.launches
    )
    return replace(plan, launches=launches)
