"""Launches that fill a tensor with dummy values: which kernel tile a box takes, and which types have a kernel."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from olq.kernels import launching, tiles
from olq.kernels.shapes import GRID, Launch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_TYPES = {
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
_INT32 = 1 << 31
_OFFSET = 8421376.0  # see `olq.kernels.dummy`
_PAIRS = 2048

Dim = tuple[int, int, int]
"""Elements, stride in memory, stride in the index."""

Box = tuple[Sequence[Dim], int, int, int, int]
"""Dimensions, of which the last is a run in the index and others have even strides in it; index of the first element,
its offset in memory; two keys."""


def fill_uniform(out: Tensor, numbers: tuple[float, float, float, float, bool], boxes: Iterable[Box]) -> bool:
    """Fill a tensor by rule `olq-uniform-1` on its device's current stream, if there is a kernel for it.

    Args:
        out: any strides without overlap; only its memory, device and type matter.
        numbers: step, centre, low, high as float32, and whether values are clamped.
        boxes: that make it up; walked only if there is a kernel. Offsets count in `out`'s storage.

    Returns:
        Whether it was filled. Scratch: none. Nothing waits for the GPU.
    """
    if out.dtype not in _TYPES or launching.unavailable((out,)):
        return False
    memory = out.detach().view(_INTEGERS[out.element_size()])
    for dims, base, offset, *keys in boxes:
        for launch, at in launches(_TYPES[out.dtype], numbers, dims, base, offset, keys):
            launching.launch_once(launch, (memory.as_strided((1,), (1,), at),))
    return True


def launches(
    dtype: str,
    numbers: tuple[float, float, float, float, bool],
    dims: Sequence[Dim],
    base: int,
    offset: int,
    keys: Sequence[int],
) -> Iterator[tuple[Launch, int]]:
    """Launches of one box, each with the offset of its first element."""
    *outer, (length, run_stride, _) = dims
    # Tiles have rows of the dimension that is nearest in memory, or of one that is too long for the rest of the grid;
    # two more are in the grid, others are walked here.
    outer.sort(key=lambda dim: (dim[0] <= GRID, dim[1]))
    row, *others = outer or [(1, 0, 0)]
    inner = [(1, 0, 0)] * 2
    walked: list[Dim] = []
    for dim in sorted(others, key=lambda dim: -dim[0]):
        free = next((d for d, (size, _, _) in enumerate(inner) if size == 1), None)
        if free is None or dim[0] > GRID:
            walked.append(dim)
        else:
            inner[free] = dim
    for index, place in _walk(walked, base, offset):
        yield _launch(dtype, numbers, (length, run_stride), row, inner, index, keys), place


def _walk(dims: Sequence[Dim], base: int, offset: int) -> Iterator[tuple[int, int]]:
    if not dims:
        yield base, offset
        return
    (size, stride, step), *rest = dims
    for i in range(size):
        yield from _walk(rest, base + i * step, offset + i * stride)


def _launch(
    dtype: str,
    numbers: tuple[float, float, float, float, bool],
    run: tuple[int, int],
    row: Dim,
    inner: Sequence[Dim],
    index: int,
    keys: Sequence[int],
) -> Launch:
    step, centre, low, high, clamps = numbers
    length, run_stride = run if run[0] > 1 else (1, 1)
    rows, row_stride, _ = row
    odd = index & 1
    pairs = (length + odd + 1) // 2
    across = run_stride != 1
    width = min(tiles.power_of_two(pairs), 16 if across and row_stride == 1 else _PAIRS)
    tile_rows = min(tiles.power_of_two(rows), max(1, _PAIRS // width))
    grid = -(-pairs // width) * -(-rows // tile_rows)
    wide = tile_rows * row_stride + 2 * width * run_stride >= _INT32
    return Launch(
        "dummy.fill",
        (0,),
        (
            rows,
            length,
            _signed(index >> 1),
            *(_signed(step_ >> 1) for _, _, step_ in (row, *inner)),
            *map(_signed, keys),
            run_stride,
            row_stride,
            *(stride for _, stride, _ in inner),
        ),
        {
            "STEP": step,
            "CENTRE": centre,
            "LOW": low,
            "HIGH": high,
            "CLAMPS": clamps,
            "FUSED": step != 0.0 and _OFFSET * step < math.ldexp(1.0, 128),
            "TYPE": dtype,
            "ODD": odd,
            "ACROSS": across,
            "ROWS": tile_rows,
            "PAIRS": width,
            "LINE": tile_rows >= rows,
            "FULL": not odd and length % (2 * width) == 0 and rows % tile_rows == 0,
            "WIDE": wide,
        },
        (grid, inner[0][0], inner[1][0]),
        4,
    )


def _signed(word: int) -> int:
    """The low 32 bits as a signed integer."""
    return ((word + _INT32) & 0xFFFFFFFF) - _INT32
