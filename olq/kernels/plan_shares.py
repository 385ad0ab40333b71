"""How the programs of a product with a quantized weight divide it: tuned on an H200, for 8192 x 8192. Integers only.

`Narrow` is for `olq.kernels.linear_small`, `Wide` for `olq.kernels.linear_wide`.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

_MANY = 128
"""Programs that keep a large GPU busy: with fewer, a program takes fewer rows, and more warps share their columns."""

_WARPS = 1024
"""Warps of all programs, likewise."""

_MOST_WARPS = 16
"""Of a program."""

_MOST_SHARES = 16
"""Of the columns, for `Wide`."""

_TOKENS = 8
"""The narrowest product of the tensor cores."""

_WIDE_WARPS = 2048
"""Warps of all programs of a `Wide` product: shares of the columns are doubled while there are fewer."""

_WIDEST = 64
"""Rows of x that a program of a `Wide` product multiplies at most."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """How a program's warps divide its work.

    Args:
        splits: shares of the columns.
        bands: bands of rows.
        rows: of a band.
        pairs, groups: a thread reads 16 bytes of a row `pairs` times side by side, and `groups` times
            so a step. With scales in w' a step has 128 columns or more, whose scales fill places of four.
        ahead: steps that codes are asked for before they are multiplied, 1 or 2.
        xahead: whether x is asked for a step ahead.
        masked: whether rows of x beyond the last are left unread, not with `xahead`; else the last stands for them,
            which takes fewer instructions, and more of what a multiprocessor's cache can deliver.
        registers: at most, a thread; 0 is the compiler's choice.
        unroll: steps of a loop's body.
    """

    splits: int
    bands: int
    rows: int
    pairs: int
    groups: int
    ahead: int = 1
    xahead: bool = False
    masked: bool = False
    registers: int = 0
    unroll: int = 1


@dataclass(frozen=True, slots=True)
class Wide:
    """How a program of `warps` x 16 rows of the weight walks along the columns.

    Args:
        warps: of a program.
        pairs: a thread reads 16 bytes of a row so many times side by side, E2M1 codes once. E8M0 scales that are
            swizzled have to have 2: a tile has four side by side.
        pieces: products of a step, 1, or of E2M1 codes up to 2. A thread reads their scales at once.
        ahead: whether what the next step needs is asked for before this one's codes are decoded.
        turns: whether shares of the columns take turns, a step each: up to 32 rows of x fp8 is 2 to 4 % faster so,
            mxfp8 1 to 2 %, and nvfp4 is slower.
        registers: as of `Narrow`.
    """

    warps: int
    pairs: int
    pieces: int = 1
    ahead: bool = False
    turns: bool = False
    registers: int = 0


_Division = TypeVar("_Division", Narrow, Wide)
NARROW = {
    "fp8": {4: Narrow(4, 1, 16, pairs=2, groups=2, xahead=True)},
    "mxfp8": {4: Narrow(4, 1, 16, pairs=2, groups=2), 8: Narrow(8, 1, 32, pairs=2, groups=1)},
    "nvfp4": {2: Narrow(4, 2, 16, pairs=2, groups=1, masked=True, registers=96)},
    "fp8 codes": {
        1: Narrow(8, 1, 16, pairs=2, groups=1, xahead=True),
        16: Narrow(4, 2, 16, pairs=2, groups=1, ahead=2, xahead=True, registers=128, unroll=2),
    },
    "fp8 codes units": {
        1: Narrow(8, 1, 16, pairs=2, groups=1, xahead=True),
        16: Narrow(4, 2, 16, pairs=2, groups=1, xahead=True, registers=128, unroll=2),
    },
}
"""By format, and by rows of x up to which it is the choice. "... units": with scales on the sums of steps."""

WIDE = {
    "fp8": {32: Wide(8, pairs=2, ahead=True, turns=True), 256: Wide(8, pairs=2)},
    "fp8 units": {32: Wide(8, pairs=2, ahead=True, turns=True), 256: Wide(8, pairs=1, turns=True)},
    "mxfp8": {32: Wide(8, pairs=2, ahead=True, turns=True), 256: Wide(8, pairs=2)},
    "nvfp4": {
        16: Wide(8, pairs=1, pieces=2, registers=128),
        32: Wide(16, pairs=1, pieces=2),
        256: Wide(8, pairs=1),
    },
}
"""The same for more rows of x than `NARROW` has."""


def row_limit(name: str) -> int:
    """Rows of x up to which the format's kernels are faster than bands."""
    return max(max(table[name]) for table in (NARROW, WIDE) if name in table)


def chosen(name: str, m: int) -> Narrow | Wide:
    """For m rows of x, at most `row_limit`."""
    every = {**WIDE.get(name, {}), **NARROW.get(name, {})}
    return every[next(rows for rows in sorted(every) if m <= rows)]


def columns_of(division: _Division, codes_a_byte: int, unit: int) -> tuple[_Division, int]:
    """(the division, columns of its step), narrower where a scale for `unit` columns stands on a step's sum."""
    times = division.groups if isinstance(division, Narrow) else division.pieces
    columns = 64 * division.pairs * times * codes_a_byte
    if unit and unit % columns:
        one = {"groups": 1} if isinstance(division, Narrow) else {"pieces": 1}
        return replace(division, pairs=1, **one), 64 * codes_a_byte
    return division, columns


def narrow(division: Narrow, columns: int, m: int, n: int, k: int) -> tuple[Narrow, int]:
    """(how warps divide the work, tokens that a program computes)."""
    splits, bands = division.splits, division.bands
    while bands > 1 and -(-n // (bands * division.rows)) < _MANY:
        bands, splits = bands // 2, splits * 2
    while splits > 1 and splits // 2 * columns >= k:
        splits //= 2
    while (
        2 * splits * bands <= _MOST_WARPS
        and -(-n // (bands * division.rows)) * bands * splits < _WARPS
        and 2 * splits * columns <= k
    ):
        splits *= 2
    return replace(division, splits=splits, bands=bands), max(1 << (m - 1).bit_length(), _TOKENS)


def wide(division: Wide, columns: int, m: int, n: int, k: int) -> tuple[int, int, int]:
    """(shares of the columns, steps of each, tokens that a program computes), for n rows of all parts."""
    tokens = min(max(1 << (m - 1).bit_length(), 2 * _TOKENS), _WIDEST)
    warps = -(-n // (16 * division.warps)) * division.warps * -(-m // tokens)
    shares = 1
    while 2 * shares <= _MOST_SHARES and 2 * shares * warps <= _WIDE_WARPS and 2 * shares * columns <= k:
        shares *= 2
    every = -(-k // columns)
    steps = -(-every // shares)
    return -(-every // steps), steps, tokens
