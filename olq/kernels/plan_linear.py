"""Launches for `matmul_fp8`, `matmul_mxfp8` and `matmul_nvfp4`: one a part, or one for parts that lie side by side.

Tensors of a call, as its launches count them: the result, x, codes, scale, (scale_2,) and the bias, if there is one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from olq.formats import MXFP8_BLOCK
from olq.kernels.shapes import GRID, Launch, Plan, place_of

_INT32 = 1 << 31
_WIDE = 1 << 30
"""Of a unit that has all rows or columns."""

_WARPS = 1024
"""Warps of all programs that keep a large GPU busy: with fewer, columns are shared among more."""

_MOST_WARPS = 16
_TOKENS = 8
"""The narrowest product of the tensor cores."""


@dataclass(frozen=True, slots=True)
class Share:
    """How a program's warps divide their work: see `olq.kernels.linear_small`. Tuned on an H200, 8192 x 8192.

    Args:
        splits: shares of the columns.
        bands: bands of rows.
        rows: of a band.
        columns: of a step.
        stages: of Triton's pipeline; more than one only where x passes through shared memory.
        registers: at most, a thread; 0 is the compiler's choice.
    """

    splits: int
    bands: int
    rows: int
    columns: int
    stages: int = 1
    registers: int = 0


_WIDE_8 = Share(4, 1, 32, 128)
_WIDE_4 = Share(4, 1, 32, 256)
SMALL = {
    "fp8": {
        1: Share(4, 1, 16, 256, stages=2),
        8: Share(4, 1, 16, 256),
        16: Share(8, 1, 32, 128, registers=128),
        32: _WIDE_8,
        64: _WIDE_8,
    },
    "mxfp8": {1: Share(4, 1, 16, 256, stages=2), 8: _WIDE_8, 16: _WIDE_8, 32: _WIDE_8, 64: _WIDE_8},
    "nvfp4": {1: _WIDE_4, 8: _WIDE_4, 16: _WIDE_4, 32: _WIDE_4},
}
"""By format, and by rows of x up to which it is the choice; for more than the last there is no kernel."""


def small_limit(name: str) -> int:
    """Rows of x up to which the format's kernel is the fastest way."""
    return max(SMALL[name])


def merged(parts: Sequence[int], starts: Sequence[int], apart: bool) -> Iterator[tuple[int, int, int, int]]:
    """(part, first kernel row, rows, first column of the result) of each launch.

    Args:
        parts: rows of each part.
        starts: first kernel row of each.
        apart: each part has a scale of its own.
    """
    column, found = 0, []
    for part, (rows, start) in enumerate(zip(parts, starts, strict=True)):
        if rows and found and not apart and found[-1][1] + found[-1][2] == start:
            found[-1][2] += rows
        elif rows:
            found.append([part, start, rows, column])
        column += rows
    yield from ((part, start, rows, column) for part, start, rows, column in found)


def _refusal(
    name: str, x: Tensor, codes: Tensor, bias: Tensor | None, parts: Sequence[int], codes_a_byte: int
) -> str | None:
    """Why there is no kernel."""
    m, k = x.shape
    if not (m and k and sum(parts)):
        return "there are no elements"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, and tensor cores multiply 16 bits"
    if m > small_limit(name):
        return f"x has {m} rows, and from {small_limit(name) + 1} on decoded bands are faster"
    if max(sum(parts), k * max(abs(x.stride(1)), 1), m * sum(parts)) >= _INT32:
        return "its rows and columns need 64 bits"
    chunk = 8 * codes_a_byte
    whole = codes.stride(1) == 1 and codes.shape[1] * codes_a_byte >= -(-k // chunk) * chunk
    if not whole or codes.stride(0) % 8 or codes.data_ptr() % 8:
        return "rows of codes can't be read eight bytes at a time"
    if bias is not None and bias.numel() > 1 and bias.stride(0) != 1:
        return f"elements of the bias are {bias.stride(0)} apart, and it is read as if they lay side by side"
    return None


def _share(name: str, m: int, n: int, k: int) -> tuple[Share, int, int]:
    """(how warps divide the work, rows of x that a program loads, tokens that it computes)."""
    most = next(rows for rows in sorted(SMALL[name]) if m <= rows)
    share = SMALL[name][most]
    splits = share.splits
    while splits > 1 and splits // 2 * share.columns >= k:
        splits //= 2
    while (
        2 * splits * share.bands <= _MOST_WARPS
        and -(-n // (share.bands * share.rows)) * share.bands * splits < _WARPS
        and 2 * splits * share.columns <= k
    ):
        splits *= 2
    return replace(share, splits=splits), min(1 << (m - 1).bit_length(), most), max(most, _TOKENS)


def _launch(
    kernel: str,
    operands: tuple[int, ...],
    numbers: tuple[int, ...],
    constants: dict[str, object],
    name: str,
    mnk: tuple[int, int, int],
) -> Launch:
    m, n, k = mnk
    share, there, tokens = _share(name, m, n, k)
    steps = -(-k // (share.splits * share.columns))
    return Launch(
        kernel,
        operands,
        numbers,
        {
            **constants,
            "SPLITS": share.splits,
            "BANDS": share.bands,
            "M": there,
            "TOKENS": tokens,
            "SHARED": there == 1,
            "ROWS": share.rows,
            "COLUMNS": share.columns,
            "STEPS": steps,
            "EVEN": k == share.splits * steps * share.columns,
        },
        (-(-n // (share.bands * share.rows)), -(-m // there), 1),
        share.splits * share.bands,
        {"num_stages": share.stages, **({"maxnreg": share.registers} if share.registers else {})},
    )


def _plan(launches: Iterator[Launch]) -> Plan | str:
    found = tuple(launches)
    if any(one.grid[1] > GRID for one in found):
        return f"x has more than {GRID} tiles of rows"
    return Plan(found)


def _eight_bits(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    pieces: Iterator[tuple[int, int, int, int]],
    scales: tuple[int, int, int, int, int],
    per_part: bool,
    constants: dict[str, object],
) -> Plan | str:
    """`scales`: strides of the scales' rows, and of parts that have one each; columns; rows and columns of a unit."""
    out, x, codes, _, bias = tensors
    m, k = x.shape
    scale_row, scale_column, unit_rows, unit_columns, part_stride = scales
    operands = (1, 2, 3, 4 if bias is not None else 1, 0)

    def launches() -> Iterator[Launch]:
        for part, row, n, column in pieces:
            numbers = (
                m,
                n,
                k,
                row,
                column,
                x.stride(0),
                x.stride(1),
                codes.stride(0),
                part * part_stride if per_part else 0,
                scale_row,
                scale_column,
                unit_rows,
                unit_columns,
                out.stride(0),
            )
            own = {**constants, "BIAS": bias is not None}
            yield _launch("linear_small.product8", operands, numbers, own, name, (m, n, k))

    return _plan(launches())


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
) -> Plan | str:
    """For `olq.ops.linear.matmul_fp8`, whose arguments these are after the result."""
    refusal = _refusal("fp8", x, codes, bias, parts, 1)
    if refusal:
        return refusal
    whole = not block_columns or block_columns >= x.shape[1]
    if not whole and block_columns % 16:
        return f"a scale is for {block_columns} columns, not for a multiple of 16"
    stride = scale.stride(0), (scale.stride(1) if scale.dim() == 2 else 0)
    rows = block_rows or _WIDE
    return _eight_bits(
        "fp8",
        (out, x, codes, scale, bias),
        merged(parts, starts, apart=not block_rows),
        (stride[0], stride[1], rows, _WIDE if whole else block_columns, stride[0]),
        not block_rows,
        {"E8M0": False, "SWIZZLED": False, "WHOLE": whole},
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
) -> Plan | str:
    """For `olq.ops.linear.matmul_mxfp8`, whose arguments these are after the result."""
    refusal = _refusal("mxfp8", x, codes, bias, parts, 1)
    if refusal:
        return refusal
    place, swizzled = place_of(scale, scale_layout)
    return _eight_bits(
        "mxfp8",
        (out, x, codes, scale, bias),
        merged(parts, starts, apart=False),
        (*place, 1, MXFP8_BLOCK, 0),
        False,
        {"E8M0": True, "SWIZZLED": swizzled, "WHOLE": False},
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
) -> Plan | str:
    """For `olq.ops.linear.matmul_nvfp4`, whose arguments these are after the result."""
    refusal = _refusal("nvfp4", x, codes, bias, parts, 2)
    if refusal:
        return refusal
    m, k = x.shape
    (scale_row, scale_column), swizzled = place_of(scale, scale_layout)
    aligned = scale.data_ptr() % 4 == 0 and scale_row % 4 == 0 and scale.shape[1] % 4 == 0
    pairs = x.stride(1) == 1 and x.stride(0) % 2 == 0 and k % 2 == 0 and x.data_ptr() % 4 == 0
    constants: dict[str, object] = {
        "SWIZZLED": swizzled,
        "PAIRS": pairs,
        "WORDS": aligned and scale_column == 1,
        "BIAS": bias is not None,
    }

    def launches() -> Iterator[Launch]:
        for part, row, n, column in merged(parts, starts, apart=True):
            numbers = (
                m,
                n,
                k,
                row,
                column,
                part * scale_2.stride(0),
                x.stride(0),
                x.stride(1),
                codes.stride(0),
                scale_row,
                scale_column,
                out.stride(0),
            )
            operands = (1, 2, 3, 4, 5 if bias is not None else 1, 0)
            yield _launch("linear_small.product4", operands, numbers, constants, "nvfp4", (m, n, k))

    return _plan(launches())
