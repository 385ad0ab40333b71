"""Sizes of tiles and numbers of warps. They change speed, never bytes. Tuned on an H200, bfloat16, 28672 x 8192."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program works on at a time.

    Args:
        rows: a power of two.
        columns: a power of two.
        warps: of 32 threads.
    """

    rows: int
    columns: int
    warps: int


ROW_ELEMENTS = 1 << 15
"""A row up to here stays in registers between its maximum and its codes; longer ones are read twice."""

ROW_REGISTERS = 32
"""A thread's, for whole rows of 16 elements a thread: with more, a multiprocessor holds fewer than its 2048 threads.
By itself the compiler takes up to 39 where a table names the tensors or a tile has several rows; `plan_fp8` knows where
32 are enough."""

UNIT_ELEMENTS = 1 << 14
"""The largest block that one program can hold."""

PROGRAMS = 1056
"""Programs of a sweep over a whole matrix: eight for each of an H200's 132 multiprocessors."""

CACHE = 32 << 20
"""Bytes of a larger matrix that a sweep leaves in the second-level cache for the next; an H200 has 50 MB."""

TOGETHER = 132
"""Programs that wait for each other, one a multiprocessor: an H200 has 132."""

TOGETHER_WARPS = 16
TOGETHER_REGISTERS = 128
"""A thread's: such a program takes all that a multiprocessor has."""

UNIT_WORDS = 2048
"""Words of 32 bits that it reads at a time: 16 bytes a thread."""

HELD = (20, 10, 5)
"""Units that stay in registers, as many of these as a program has: 20 take 80 of a thread's."""

HELD_AHEAD = 4
"""Units that it asks for before those in front of them are used."""

LEAST_TOGETHER = TOGETHER * HELD[-1] * 2 * UNIT_WORDS
"""Elements of the smallest matrix whose programs have units to hold."""

LARGEST_TOGETHER = 28672 * 8192
"""Elements of the largest matrix that was measured, where one launch took 0.97 times as long as two sweeps. Its kernel
counts in 32 bits, a few units beyond the last."""

_TALL = Tile(64, 64, 4)
"""For a source whose rows, not columns, are neighbours in memory."""


def power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def whole_rows(k: int, tall: bool) -> Tile:
    """Rows with a scale each."""
    if tall and k > _TALL.columns:
        return _TALL
    columns = min(max(power_of_two(k), 16), ROW_ELEMENTS)
    rows = max(1, 4096 // columns)
    # All threads of a row wait for its maximum. Of rows of 16384 elements a multiprocessor holds three with 8 warps (80
    # registers a thread), two with 16 (53): another one is read or written meanwhile.
    return Tile(rows, columns, _warps(rows * columns, 512 if columns <= 8192 else 2048, 16))


def unit(rows: int, columns: int) -> Tile:
    """A block that one program quantizes."""
    rows, columns = power_of_two(rows), max(power_of_two(columns), 16)
    return Tile(rows, columns, _warps(rows * columns, 4096, 4))


def groups(k: int, group: int, tall: bool, tiled: bool = False) -> Tile:
    """Groups of columns along a row; a tile holds whole ones. `tiled`: neighbouring rows share scale sectors."""
    if tall:
        return Tile(max(1, 4096 // max(64, group)), max(64, group), 4)
    columns = _divisor(k, max(1024, group), group)
    elements = 4096 if tiled else 1024
    rows = max(1, elements // columns)
    return Tile(rows, columns, _warps(rows * columns, 1024, 4))


def nvfp4(k: int, tall: bool) -> Tile:
    """Blocks of 16, which take more arithmetic."""
    if tall:
        return _TALL
    columns = _divisor(k, 2048, 16)
    rows = max(1, 2048 // columns)
    return Tile(rows, columns, _warps(rows * columns, 1024, 8))


def decode(k: int) -> Tile:
    """Values from codes."""
    columns = _divisor(k, 2048, 32)
    return Tile(max(1, 4096 // columns), columns, 4)


def magnitudes(n: int, k: int, tall: bool) -> Tile:
    """A walk over a whole matrix that only reads."""
    return _sweep(n, k, tall, 8192)


def encoding(n: int, k: int, tall: bool) -> Tile:
    """A walk over a whole matrix that reads and writes."""
    return _sweep(n, k, tall, 4096)


def _sweep(n: int, k: int, tall: bool, elements: int) -> Tile:
    if tall:
        return _TALL
    columns = min(max(power_of_two(k), 16), elements)
    rows = max(1, min(power_of_two(n), elements // columns))
    return Tile(rows, columns, _warps(rows * columns, 1024, 8))


def _divisor(k: int, largest: int, least: int) -> int:
    """A power of two up to `largest` that divides k, if one of 512 or more does; else one that holds k, if small."""
    columns = max(min(power_of_two(k), largest), least)
    while columns > max(512, least) and k % columns:
        columns //= 2
    return columns


def _warps(elements: int, each: int, most: int) -> int:
    return min(max(elements // each, 1), most)
