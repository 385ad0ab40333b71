"""What plans share: a launch as data, the matrices of a call, tiles over them. Integers only.

Nothing here imports triton, reads a tensor or asks for a device: shapes, strides and dtypes decide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from olq.formats import FLOAT32_MAX
from olq.kernels import tiles
from olq.kernels.tiles import Tile

SCRATCH = -1
"""As an operand: the plan's scratch, not an argument."""

GRID = 65535
"""A CUDA grid's second and third extent."""

WORDS = 4
"""Addresses in a row of a batch's table: as many operands as a kernel may have."""

_INT32 = 1 << 31
_NARROW = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NO_ELEMENTS = "there are no elements"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch without addresses.

    Args:
        kernel: "module.function" in olq.kernels.
        operands: which tensors, counted among the operator's tensor arguments; `SCRATCH` for the scratch.
        numbers: the kernel's integers, in its order.
        constants: what it is compiled for, in its order.
        grid: column tiles, row tiles, matrices; for rows and sweeps: programs, 1, matrices.
        warps: a program.
        options: further ones of Triton's compiler, by its names.
        waits: before it touches memory the kernel itself waits for the launch in front of it on its stream, which
            need not be done when it starts. Its constant EARLY, and that of a kernel that lets the next one start, are
            set where a GPU can do so.
        together: its programs wait for each other, so that all have to run at the same time: a cooperative launch.
            Each takes a multiprocessor for itself, all of its registers (`tiles.TOGETHER_REGISTERS`).
    """

    kernel: str
    operands: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, object]
    grid: tuple[int, int, int]
    warps: int
    options: dict[str, int] = field(default_factory=dict)
    waits: bool = False
    together: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches in order.

    Args:
        launches: of one call.
        scratch: float32 that they share.
        together: a faster plan with launches that are `together`, for a GPU that can run so many programs.
    """

    launches: tuple[Launch, ...]
    scratch: int = 0
    together: "Plan | None" = None


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one call: how many, their extents, and each tensor's distance from one to the next."""

    matrices: int
    n: int
    k: int
    steps: tuple[int, ...]


def merge(n: int, k: int, lead: Sequence[int], tensors: Sequence[Tensor]) -> Matrices | str:
    """See the leading dimensions of all tensors as one, if their strides allow it."""
    count = len(lead)
    matrices, steps = 1, [0] * len(tensors)
    for dimension in reversed(range(count)):
        extent = lead[dimension]
        if extent == 1:
            continue
        strides = [t.stride(dimension) for t in tensors]
        if matrices == 1:
            steps = strides
        elif any(stride != step * matrices for stride, step in zip(strides, steps, strict=True)):
            return "the leading dimensions of its tensors can't be seen as one"
        matrices *= extent
    if not (matrices and n and k):
        return _NO_ELEMENTS
    if matrices > GRID:
        return f"there are {matrices} matrices, more than {GRID}"
    if max(n, k) >= _INT32:
        return f"a matrix of {n} x {k} needs 64-bit rows or columns"
    return Matrices(matrices, n, k, tuple(steps))


def matrices_of(source: Tensor, *others: Tensor) -> Matrices | str:
    """`merge` for a source of [*lead, n, k]."""
    *lead, n, k = source.shape
    return merge(n, k, lead, (source, *others))


def cover(tile: Tile, n: int) -> Tile:
    """As many more rows as a grid of limited height needs."""
    while -(-n // tile.rows) > GRID:
        tile = replace(tile, rows=2 * tile.rows)
    return tile


def is_tall(t: Tensor) -> bool:
    """Whether neighbours in memory are in a column, not in a row."""
    return t.stride(-1) != 1 and t.stride(-2) == 1 and t.shape[-1] > 1


def is_dense(k: int, *tensors: Tensor) -> bool:
    """Whether nothing lies between the rows, of k columns, of any."""
    return all(t.stride(-1) == 1 and t.stride(-2) == k for t in tensors)


def wide(tile: Tile, *tensors: Tensor) -> bool:
    """Whether an offset within a tile may need more than 32 bits."""
    return any(tile.rows * t.stride(-2) + tile.columns * t.stride(-1) >= _INT32 for t in tensors)


def reading_of(source: Tensor, through: torch.dtype | None, saturate: bool) -> dict[str, object]:
    """What `olq.kernels.memory.finish` is compiled for: see olq.numerics.source."""
    rounds = through in _NARROW and through != source.dtype
    largest = min(torch.finfo(through or source.dtype).max, FLOAT32_MAX) if saturate else 0.0
    return {"THROUGH": _NARROW[through] if rounds and through else "", "LARGEST": largest}


def tiling_of(tile: Tile, n: int, k: int, *tensors: Tensor) -> dict[str, object]:
    """What every kernel is compiled for; `tensors` are those that it walks in tiles."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "FULL": n % tile.rows == 0 and k % tile.columns == 0,
        "WIDE": wide(tile, *tensors),
    }


def strides_of(step: int, t: Tensor) -> tuple[int, int, int]:
    """From one matrix, row and column to the next."""
    return step, t.stride(-2), t.stride(-1)


def place_of(scale: Tensor, layout: str) -> tuple[tuple[int, int], bool]:
    """(row stride, column stride) as the kernels' `places` want them, and whether swizzled."""
    swizzled = layout == "swizzled_128x4"
    return ((scale.shape[-1], 1) if swizzled else (scale.stride(-2), scale.stride(-1))), swizzled


@dataclass(frozen=True, slots=True)
class Sweep:
    """A walk over whole matrices: their shape, as one long row if all is dense; the tile; how many across, in all."""

    shape: Matrices
    tile: Tile
    across: int
    count: int

    @property
    def programs(self) -> int:
        """Programs for each matrix."""
        return min(self.count, max(1, tiles.PROGRAMS // self.shape.matrices))

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What a sweep's kernel counts with."""
        return self.shape.n, self.shape.k, self.across, self.count

    def tiling(self, *tensors: Tensor) -> dict[str, object]:
        """`tiling_of`, and whether all tiles are in one row."""
        tiling = tiling_of(self.tile, self.shape.n, self.shape.k, *tensors)
        return {**tiling, "LINE": self.count == self.across}


def sweep_of(choose: Callable[[int, int, bool], Tile], shape: Matrices, *tensors: Tensor) -> Sweep:
    """Choose a tile for matrices all of whose tensors are walked alike; the first is the source."""
    n, k = shape.n, shape.k
    dense = is_dense(k, *tensors)
    if dense and n * k < _INT32:
        n, k = 1, n * k
    tile = choose(n, k, is_tall(tensors[0]) and not dense)
    across = -(-k // tile.columns)
    return Sweep(replace(shape, n=n, k=k), tile, across, -(-n // tile.rows) * across)


def magnitudes_of(shape: Matrices, source: Tensor, reading: dict[str, object]) -> tuple[Launch, int]:
    """The launch that leaves each program's largest magnitude in the scratch; how many programs a matrix has."""
    sweep = sweep_of(tiles.magnitudes, shape, source)
    one = Launch(
        "tensor.amax_partials",
        (0, SCRATCH),
        (*sweep.numbers, _fleeting(sweep, source), *strides_of(shape.steps[0], source)),
        {**reading, **sweep.tiling(source)},
        (sweep.programs, 1, shape.matrices),
        sweep.tile.warps,
    )
    return one, sweep.programs


def _fleeting(sweep: Sweep, source: Tensor) -> int:
    """Tiles of a sweep, the first ones, that the cache need not keep: where it holds a part of one dense matrix."""
    size = sweep.tile.rows * sweep.tile.columns * source.element_size()
    kept = tiles.CACHE // size
    some = sweep.count == sweep.across and sweep.shape.matrices == 1 and kept < sweep.count <= 4 * kept
    return sweep.count - kept if some else 0
