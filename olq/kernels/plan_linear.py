"""Launches for `matmul_*` and `multiply_codes_fp8_`: one a part, or one for parts that lie side by side.

Tensors of a call, as its launches count them: the result, x, codes, scale, (scale_2,) and the bias, if there is one; of
`multiply_codes_fp8_` x, its scale, codes, scale, the bias, the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from olq.kernels.plan_shares import Narrow, Wide, chosen, columns_of, narrow, row_limit, wide
from olq.kernels.shapes import SCRATCH, Launch, Plan, place_of

_INT32 = 1 << 31
_ALL_ROWS = 1 << 30
"""Of a unit that has all rows."""

_UNIT = 64
"""Columns of a scale that stands on the sum of a step: a multiple of these."""

_LONGEST_BLOCK = 32
"""Columns of the longest block."""

_ADDED = 512
"""Columns of the result for which a program adds shares, 16 bytes of each a thread; others took longer on an H200."""


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
    if m > row_limit(name):
        way = "torch's product is" if name == "fp8 codes" else "decoded bands are"
        return f"x has {m} rows, and from {row_limit(name) + 1} on {way} faster"
    if max(sum(parts), (k + _LONGEST_BLOCK) * max(abs(x.stride(1)), 1), m * sum(parts)) >= _INT32:
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


@dataclass(frozen=True, slots=True)
class _Call:
    """What launches of a call have in common.

    Args:
        name: in `plan_shares`.
        operands: x, its scale, codes, scale, scale_2, bias, result, as `Launch` counts them.
        x, codes, out: tensors.
        x_scale: strides, of rows and columns, or zeros.
        scale: strides likewise.
        unit: rows of a scale, and columns of one that stands on the sum of a step; 0 if none does.
        part_stride: of scales that each part has one of, else 0.
        scale_2: stride from one part's to the next.
        constants: those that both kernels have of the weight and the bias.
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

    def plan(self, pieces: Iterator[tuple[int, int, int, int]]) -> Plan:
        """Launches for rows of one part each, or of parts that lie side by side: see `merged`."""
        codes_a_byte = 2 if self.constants["E2M1"] else 1
        division, columns = columns_of(chosen(self.name, len(self.x)), codes_a_byte, self.unit[1])
        if isinstance(division, Narrow):
            return Plan(tuple(self._narrow(division, columns, *piece) for piece in pieces))
        return self._wide(division, columns, tuple(pieces))

    def _narrow(self, division: Narrow, columns: int, part: int, row: int, n: int, column: int) -> Launch:
        m, k = self.x.shape
        division, tokens = narrow(division, columns, m, n, k)
        steps = -(-k // (division.splits * columns))
        numbers = (
            *(m, n, k, row, column, part * self.scale_2),
            *self.x.stride(),
            *self.x_scale,
            *self._of_weight(part),
            self.out.stride(0),
        )
        tiling = {
            "X8": self.x.dtype == torch.uint8,
            "SPLITS": division.splits,
            "BANDS": division.bands,
            "TOKENS": tokens,
            "ROWS": division.rows,
            "AHEAD": division.ahead,
            "XAHEAD": division.xahead,
            "MASKED": division.masked,
            "PAIRS": division.pairs,
            "GROUPS": division.groups,
            "STEPS": steps,
            "UNIT_STEPS": max(self.unit[1] // columns, 1),
            "UNROLL": division.unroll,
            "EVEN": k == division.splits * steps * columns,
        }
        return Launch(
            "linear_small.product",
            self.operands,
            numbers,
            {**self.constants, **tiling},
            (-(-n // (division.bands * division.rows)), 1, 1),
            division.splits * division.bands,
            _options(division),
            waits=True,
        )

    def _wide(self, division: Wide, columns: int, pieces: tuple[tuple[int, int, int, int], ...]) -> Plan:
        (m, k), width = self.x.shape, self.out.shape[1]
        shares, steps, tokens = wide(division, columns, m, width, k)
        x, _, *weight, bias, out = self.operands
        whole = shares == 1
        tiling = {
            "SHARES": shares,
            "WARPS": division.warps,
            "TOKENS": tokens,
            "DENSE": self.x.stride(1) == 1,
            "PAIRS": division.pairs,
            "PIECES": division.pieces,
            "AHEAD": division.ahead,
            "APART": shares if division.turns else 1,
            "STEPS": steps,
            "UNIT_STEPS": max(self.unit[1] // columns, 1),
            "EVEN": k == shares * steps * columns,
        }
        launches = [
            Launch(
                "linear_wide.product",
                (x, *weight, bias, out if whole else SCRATCH),
                (
                    *(m, n, k, row, column, part * self.scale_2),
                    *self.x.stride(),
                    *self._of_weight(part),
                    *((self.out.stride(0), 0) if whole else (width, m * width)),
                ),
                {**self.constants, **tiling},
                (-(-n // (16 * division.warps)) * shares, -(-m // tokens), 1),
                division.warps,
                _options(division),
                waits=True,
            )
            for part, row, n, column in pieces
        ]
        if whole:
            return Plan(tuple(launches))
        add = Launch(
            "linear_wide.add",
            (SCRATCH, bias, out),
            (width, self.out.stride(0), m * width),
            {"BIAS": self.constants["BIAS"], "SHARES": shares, "BLOCK": _ADDED},
            (-(-width // _ADDED), m, 1),
            4,
            waits=True,
        )
        return Plan((*launches, add), shares * m * width)

    def _of_weight(self, part: int) -> tuple[int, ...]:
        """The stride of codes; of scales the first, both strides, and the rows of one."""
        return self.codes.stride(0), part * self.part_stride, *self.scale, self.unit[0]


def _options(division: Narrow | Wide) -> dict[str, int]:
    """Of Triton's compiler."""
    return {"num_stages": 1, **({"maxnreg": division.registers} if division.registers else {})}


def _constants(
    scales: str, bias: Tensor | None, e2m1: bool = False, swizzled: bool = False, words: bool = False
) -> dict[str, object]:
    return {
        "E2M1": e2m1,
        "SCALES": scales,
        "SWIZZLED": swizzled,
        "WORDS": words,
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
        name if whole else f"{name} units",
        operands,
        x,
        codes,
        out,
        (scale.stride(0), scale.stride(1) if scale.dim() == 2 else 0),
        (rows or _ALL_ROWS, 0 if whole else columns),
        _constants("whole" if whole else "units", bias),
        x_scale=x_strides,
        part_stride=0 if rows else scale.stride(0),
    )
    return call.plan(merged(parts, starts, apart=not rows))


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
    return call.plan(merged(parts, starts, apart=False))


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
    # Four scales are one word where a thread reads 32 bytes of codes, and two where it reads 16.
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
    return call.plan(merged(parts, starts, apart=True))
