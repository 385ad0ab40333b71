"""Block scales between row-major and 128x4 order: tensors, vectorised.

Letters   R, C = rows and columns of scale bytes; R', C' = R up to a multiple of 128, C up to a multiple of 4.
Spec      docs/formats/layouts.md; the map itself is olq.layout.swizzle
Elsewhere memory is made in olq.alloc.

All of it moves bytes: uint8 tensors, whatever the bytes mean.
"""

import torch
from torch import Tensor

from olq.alloc import TensorSpec, allocate
from olq.errors import LayoutError
from olq.layout import Swizzle128x4
from olq.layout.swizzle import padded_shape


def flat_index(rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Positions in 128x4 order, for scattered writes into the flattened bytes of one matrix.

    Args:
        rows: integer rows; any shape that broadcasts with `columns`.
        columns: integer scale columns.
        width: C, logical scale columns of the whole matrix.

    Returns:
        int64, the broadcast shape. Nothing is checked.
    """
    r, c = rows.to(torch.int64), columns.to(torch.int64)
    tile = r // 128 * -(-width // 4) + c // 4
    return tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def swizzle_128x4(linear: Tensor, out: Tensor | None = None) -> Tensor:
    """Put a whole matrix of scale bytes into 128x4 order, padding included.

    Args:
        linear: [*lead, R, C], uint8, any strides.
        out: [*lead, R', C'], uint8, contiguous: every byte is written, padding with 0. None makes it.

    Returns:
        `out`. Scratch: none.

    Raises:
        LayoutError: a dtype or a shape does not fit.
    """
    R, C = _matrix(linear, "swizzle_128x4")
    lead = linear.shape[:-2]
    spec = TensorSpec.of(Swizzle128x4(R, C), lead=tuple(lead))
    if out is None:
        out = allocate(spec, device=linear.device, owner="swizzle_128x4")
    else:
        _check(out, spec.shape, "swizzle_128x4")
        _clear_edges_(_tiles(out), R, C)
    tiles = _tiles(out)
    full = R // 128
    # [..., Tr, 4, 32, C] row-major rows against [..., Tr, Tc, 32, 4, 4] tiles, by whole column tiles and the
    # ragged one.
    for first, last in ((0, C // 4 * 4), (C // 4 * 4, C)):
        if first == last:
            continue
        t = slice(first // 4, -(-last // 4))
        width = last - first if last - first < 4 else 4
        part = linear[..., first:last]
        if full:
            rows = part[..., : full * 128, :].unflatten(-2, (full, 4, 32)).unflatten(-1, (-1, width))
            tiles[..., :full, t, :, :, :width] = rows.movedim(-2, -4).transpose(-2, -3)
        for start in range(full * 128, R, 32):
            rows = part[..., start : min(start + 32, R), :].unflatten(-1, (-1, width))
            tiles[..., full, t, : rows.shape[-3], start % 128 // 32, :width] = rows.transpose(-2, -3)
    return out


def unswizzle_128x4(swizzled: Tensor, rows: int, columns: int, out: Tensor | None = None) -> Tensor:
    """Read a matrix of scale bytes back from 128x4 order.

    Args:
        swizzled: [*lead, R', C'], uint8, contiguous.
        rows: R.
        columns: C.
        out: [*lead, R, C], uint8, any strides. None makes it.

    Returns:
        `out`, row-major. Scratch: R' * C' bytes a matrix.

    Raises:
        LayoutError: a dtype or a shape does not fit.
    """
    _matrix(swizzled, "unswizzle_128x4")
    _check(swizzled, (*swizzled.shape[:-2], *padded_shape(rows, columns)), "unswizzle_128x4")
    shape = (*swizzled.shape[:-2], rows, columns)
    if out is None:
        out = allocate(TensorSpec(shape, torch.uint8), device=swizzled.device, owner="unswizzle_128x4")
    else:
        _check(out, shape, "unswizzle_128x4", contiguous=False)
    height, width = padded_shape(rows, columns)
    padded = _tiles(swizzled).movedim((-2, -3), (-4, -3)).reshape(*shape[:-2], height, width)
    return out.copy_(padded[..., :rows, :columns])


def _tiles(swizzled: Tensor) -> Tensor:
    """[..., R'/128, C'/4, 32, 4, 4]: row tile, column tile, r % 32, r % 128 / 32, c % 4."""
    height, width = swizzled.shape[-2:]
    return swizzled.view(*swizzled.shape[:-2], height // 128, width // 4, 32, 4, 4)


def _clear_edges_(tiles: Tensor, R: int, C: int) -> None:
    for fill in Swizzle128x4(R, C).fills():
        tiles[(..., *(slice(start, stop) for start, stop in fill.box))] = 0


def _matrix(t: Tensor, where: str) -> tuple[int, int]:
    if t.dtype != torch.uint8 or t.dim() < 2:
        raise LayoutError(
            "Block scales are moved as a matrix of bytes.",
            where=where,
            found=f"{t.dtype}, shape {list(t.shape)}",
            need="uint8, [*lead, rows, columns]",
            remedy="pass scale.view(torch.uint8)",
        )
    return t.shape[-2], t.shape[-1]


def _check(t: Tensor, shape: tuple[int, ...], where: str, *, contiguous: bool = True) -> None:
    if t.dtype != torch.uint8 or tuple(t.shape) != shape or (contiguous and not t.is_contiguous()):
        raise LayoutError(
            "A tensor of block scales has the wrong form.",
            where=where,
            found=f"{t.dtype}, shape {list(t.shape)}, strides {list(t.stride())}",
            need=f"uint8, shape {list(shape)}{', contiguous' if contiguous else ''}",
            remedy="make it with olq.alloc.allocate and a Swizzle128x4 order",
        )
