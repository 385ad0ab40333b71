"""Launches for `matmul_*` and `multiply_codes_fp8_`: one a part, or one for parts that lie side by side.

Tensors of a call, as its launches count them: the result, x, codes, scale, (scale_2,) and the bias, if there is one; of
`multiply_codes_fp8_` x, its scale, codes, scale, the bias, the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from olq.kernels.shapes import Launch, Plan, place_of

_INT32 = 1 << 31
_WIDE = 1 << 30
"""Of a unit that has all rows."""

_MANY = 128
"""Programs that keep a large GPU busy: with fewer, a program takes fewer rows, and more warps share their columns."""

_WARPS = 1024
"""Warps of all programs, likewise."""

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
        pairs, groups: a thread reads 16 bytes of a row `pairs` times side by side, and `groups` times so a step. With
            scales in w' a step has 128 columns or more, whose scales fill places of four.
        ahead: steps that codes are asked for before they are multiplied, 1 or 2.
        xahead: whether x is asked for a step ahead.
        registers: at most, a thread; 0 is the compiler's choice.
    """

    splits: int
    bands: int
    rows: int
    pairs: int
    groups: int
    ahead: int = 1
    xahead: bool = False
    registers: int = 0

    def columns(self, codes_a_byte: int) -> int:
        """Of a step."""
        return 64 * self.pairs * self.groups * codes_a_byte


_SIXTEENS = Share(4, 4, 16, pairs=1, groups=2, registers=128)
_PLAIN = Share(4, 1, 32, pairs=1, groups=2)
SMALL = {
    "fp8": {
        1: Share(8, 1, 16, pairs=2, groups=1, xahead=True),
        8: replace(_SIXTEENS, ahead=2),
        16: replace(_SIXTEENS, xahead=True),
        32: _SIXTEENS,
        64: _PLAIN,
    },
    "mxfp8": {
        4: Share(8, 1, 16, pairs=2, groups=1),
        8: Share(8, 1, 32, pairs=2, groups=1),
        16: _SIXTEENS,
        64: _PLAIN,
    },
    "nvfp4": {
        1: Share(8, 1, 32, pairs=2, groups=1),
        8: Share(8, 1, 32, pairs=1, groups=1, xahead=True),
        16: Share(4, 2, 32, pairs=1, groups=1, xahead=True),
        32: Share(4, 2, 32, pairs=1, groups=1),
    },
    "fp8 codes": {
        1: Share(8, 1, 16, pairs=2, groups=1, xahead=True),
        16: Share(4, 4, 16, pairs=2, groups=1, xahead=True, registers=128),
    },
}
"""By format, and by rows of x up to which it is the choice; for more than the last there is no kernel."""

_UNIT = 64
"""Columns of a scale that stands on the sum of a step: a multiple of these."""


def small_limit(name: str) -> int:
    """Rows of x up to which the format's kernel is faster than bands."""
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
    name: str,
    x: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    codes_a_byte: int,
    scales: Sequence[Tensor],
) -> str | None:
    """Why there is no kernel."""
    m, k = x.shape
    if not (m and k and sum(parts)):
        return "there are no elements"
    if name != "fp8 codes" and x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, and tensor cores multiply 16 bits"
    if m > small_limit(name):
        way = "torch's product is" if name == "fp8 codes" else "decoded bands are"
        return f"x has {m} rows, and from {small_limit(name) + 1} on {way} faster"
    if max(sum(parts), k * max(abs(x.stride(1)), 1), m * sum(parts)) >= _INT32:
        return "its rows and columns need 64 bits"
    if any(s.dim() == 2 and (s.shape[1] - 1) * s.stride(1) >= _INT32 for s in scales):
        return "columns of its scales need 64 bits"
    if not _words(codes, k, codes_a_byte):
        return "rows of codes can't be read eight bytes at a time"
    if name == "fp8 codes" and not _words(x, k, 1):
        return "rows of x can't be read eight bytes at a time"
    if bias is not None and bias.numel() > 1 and bias.stride(0) != 1:
        return f"elements of the bias are {bias.stride(0)} apart, and it is read as if they lay side by side"
    return None


def _words(codes: Tensor, k: int, codes_a_byte: int) -> bool:
    """Whether whole words of eight bytes hold a row's codes."""
    chunk = 8 * codes_a_byte
    whole = codes.stride(1) == 1 and codes.shape[1] * codes_a_byte >= -(-k // chunk) * chunk
    return whole and codes.stride(0) % 8 == 0 and codes.data_ptr() % 8 == 0


def _share(name: str, m: int, n: int, k: int, unit: int, codes_a_byte: int) -> tuple[Share, int, int]:
    """(how warps divide the work, rows of x that a program loads, tokens that it computes).

    Args:
        unit: columns of a scale that stands on the sum of a step; 0 if there is none.
    """
    most = next(rows for rows in sorted(SMALL[name]) if m <= rows)
    share = SMALL[name][most]
    if unit and unit % share.columns(codes_a_byte):
        share = replace(share, pairs=1, groups=1)
    splits, bands, columns = share.splits, share.bands, share.columns(codes_a_byte)
    while bands > 1 and -(-n // (bands * share.rows)) < _MANY:
        bands, splits = bands // 2, splits * 2
    while splits > 1 and splits // 2 * columns >= k:
        splits //= 2
    while (
        2 * splits * bands <= _MOST_WARPS
        and -(-n // (bands * share.rows)) * bands * splits < _WARPS
        and 2 * splits * columns <= k
    ):
        splits *= 2
    tokens = max(1 << (m - 1).bit_length(), _TOKENS)
    return replace(share, splits=splits, bands=bands), 1 if m == 1 else tokens, tokens


@dataclass(frozen=True, slots=True)
class _Call:
    """What launches of a call have in common.

    Args:
        name: in `SMALL`.
        operands: x, its scale, codes, scale, scale_2, bias, result, as `Launch` counts them.
        x, codes, out: tensors.
        x_scale: strides, of rows and columns, or zeros.
        scale: strides likewise.
        unit: rows of a scale, and columns of one that stands on the sum of a step; 0 if none does.
        part_stride: of scales that each part has one of, else 0.
        scale_2: stride from one part's to the next.
        constants: the kernel's first ones.
    """

    name: str
    operands: tuple[int, ...]
    x: Tensor
    codes: Tensor
    out: Tensor
    scale: tuple[int, int]
    unit: tuple[int, int]
    constants: dict[str, object]
    x_scale: tuple[int, int] = (0, 0)
    part_stride: int = 0
    scale_2: int = 0

    def launch(self, part: int, row: int, n: int, column: int) -> Launch:
        """For rows of one part, or of parts that lie side by side."""
        m, k = self.x.shape
        codes_a_byte = 2 if self.constants["E2M1"] else 1
        unit_rows, unit_columns = self.unit
        share, there, tokens = _share(self.name, m, n, k, unit_columns, codes_a_byte)
        columns = share.columns(codes_a_byte)
        steps = -(-k // (share.splits * columns))
        numbers = (
            m,
            n,
            k,
            row,
            column,
            part * self.scale_2,
            *self.x.stride(),
            *self.x_scale,
            self.codes.stride(0),
            part * self.part_stride,
            *self.scale,
            unit_rows,
            self.out.stride(0),
        )
        tiling = {
            "SPLITS": share.splits,
            "BANDS": share.bands,
            "M": there,
            "TOKENS": tokens,
            "ROWS": share.rows,
            "PAIRS": share.pairs,
            "GROUPS": share.groups,
            "STEPS": steps,
            "UNIT_STEPS": max(unit_columns // columns, 1),
            "AHEAD": share.ahead,
            "XAHEAD": share.xahead,
            "EVEN": k == share.splits * steps * columns,
        }
        return Launch(
            "linear_small.product",
            self.operands,
            numbers,
            {**self.constants, **tiling},
            (-(-n // (share.bands * share.rows)), -(-m // there), 1),
            share.splits * share.bands,
            {"num_stages": 1, **({"maxnreg": share.registers} if share.registers else {})},
            waits=True,
        )


def _plan(call: _Call, pieces: Iterator[tuple[int, int, int, int]]) -> Plan:
    return Plan(tuple(call.launch(*piece) for piece in pieces))


def _constants(
    scales: str, bias: Tensor | None, e2m1: bool = False, swizzled: bool = False, words: bool = False, x8: bool = False
) -> dict[str, object]:  # fmt: skip
    return {
        "E2M1": e2m1,
        "SCALES": scales,
        "SWIZZLED": swizzled,
        "WORDS": words,
        "X8": x8,
        "BIAS": bias is not None,
    }


def _float32_scales(
    name: str,
    operands: tuple[int, ...],
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    block: tuple[int, int],
    x_scale: Tensor | None = None,
) -> Plan | str:
    """For fp8, whose scale is for `block`, (rows, columns), where 0 is all of them; `x_scale` where x are codes too."""
    k, (rows, columns) = x.shape[1], block
    whole = not columns or columns >= k
    if not whole and columns % _UNIT:
        return f"a scale is for {columns} columns, not for a multiple of {_UNIT}"
    x_strides = (0, 0)
    if x_scale is not None:
        x_strides = (0 if x_scale.shape[0] == 1 else x_scale.stride(0), x_scale.stride(1))
    call = _Call(
        name,
        operands,
        x,
        codes,
        out,
        (scale.stride(0), scale.stride(1) if scale.dim() == 2 else 0),
        (rows or _WIDE, 0 if whole else columns),
        _constants("whole" if whole else "units", bias, x8=x_scale is not None),
        x_scale=x_strides,
        part_stride=0 if rows else scale.stride(0),
    )
    return _plan(call, merged(parts, starts, apart=not rows))


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
    refusal = _refusal("fp8", x, codes, bias, parts, 1, (scale,))
    if refusal:
        return refusal
    operands = (1, 1, 2, 3, 1, 4 if bias is not None else 1, 0)
    block = block_rows, block_columns
    return _float32_scales("fp8", operands, out, x, codes, scale, bias, parts, starts, block)


def multiply_codes_fp8(
    x: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    parts: Sequence[int],
    starts: Sequence[int],
    block_rows: int,
    block_columns: int,
    out: Tensor,
) -> Plan | str:
    """For `olq.ops.codes.multiply_codes_fp8_`, whose arguments these are."""
    refusal = _refusal("fp8 codes", x, codes, bias, parts, 1, (scale, x_scale))
    if refusal:
        return refusal
    if out.dtype == torch.float32:
        return "the result is float32, and the kernel writes 16 bits"
    if out.stride(1) != 1:
        return "columns of the result are not next to each other"
    operands = (0, 1, 2, 3, 0, *((4, 5) if bias is not None else (0, 4)))
    block = block_rows, block_columns
    return _float32_scales("fp8 codes", operands, out, x, codes, scale, bias, parts, starts, block, x_scale)


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
    refusal = _refusal("mxfp8", x, codes, bias, parts, 1, (scale,))
    if refusal:
        return refusal
    place, swizzled = place_of(scale, scale_layout)
    call = _Call(
        "mxfp8",
        (1, 1, 2, 3, 1, 4 if bias is not None else 1, 0),
        x,
        codes,
        out,
        place,
        (1, 0),
        _constants("e8m0", bias, swizzled=swizzled),
    )
    return _plan(call, merged(parts, starts, apart=False))


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
    refusal = _refusal("nvfp4", x, codes, bias, parts, 2, (scale,))
    if refusal:
        return refusal
    place, swizzled = place_of(scale, scale_layout)
    aligned = scale.data_ptr() % 4 == 0 and place[0] % 4 == 0 and scale.shape[1] % 4 == 0
    call = _Call(
        "nvfp4",
        (1, 1, 2, 3, 4, 5 if bias is not None else 1, 0),
        x,
        codes,
        out,
        place,
        (1, 0),
        _constants("e4m3", bias, e2m1=True, swizzled=swizzled, words=aligned and place[1] == 1),
        scale_2=scale_2.stride(0),
    )
    return _plan(call, merged(parts, starts, apart=True))
