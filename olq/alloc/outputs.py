"""The outputs that kernels of the field write, with the bytes that the field's readers expect.

Each helper makes its tensors with `empty` and writes the padding that belongs to their order; the producer
writes the rest and nothing else. Shapes, strides and bytes are those of docs/formats/layouts.md; codes, scale
bytes and packed codes are uint8, to be viewed as float8 or float4 where a kernel reads them.

Letters   M = rows (tokens), K = logical columns, G = ceil(K / group) scales a row.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from olq.alloc.memory import allocate
from olq.alloc.spec import TensorSpec
from olq.errors import LayoutError
from olq.layout import MNMajor, Nibbles, Order, RowMajor, Swizzle128x4, UE8M0Words, check_tiling

BlockScaleLayout = Literal["linear", "swizzled_128x4"]
GroupScaleLayout = Literal["row_major", "mn_major", "ue8m0_words"]

_Choice = TypeVar("_Choice")

NVFP4_GROUP = 16
MXFP8_GROUP = 32
FP8_GROUP = 128


class CodesAndScale(NamedTuple):
    """Codes of a quantized matrix and their decode scales."""

    codes: Tensor
    scale: Tensor


def fp4_output(
    rows: int,
    columns: int,
    *,
    scale_layout: BlockScaleLayout = "linear",
    group: int = NVFP4_GROUP,
    lead: tuple[int, ...] = (),
    extra_tiles: int = 0,
    device: torch.device | str,
    owner: str,
) -> CodesAndScale:
    """Packed E2M1 codes and one scale byte for each `group` columns: NVFP4 (16, E4M3) or MXFP4 (32, E8M0).

    Args:
        rows: M.
        columns: K.
        scale_layout: order of the scale bytes.
        group: columns that share a scale; the last group of a row may be part-filled.
        lead: leading dimensions, such as experts; each matrix has its own padding.
        extra_tiles: swizzled only: row tiles after the last, for schedulers that visit more than there are.
        device: where.
        owner: who has to write codes and scales.

    Returns:
        codes: uint8 [*lead, M, ceil(K / 2)], low nibble first; with K odd the producer writes 0 to the last
            high nibble.
        scale: uint8, linear [*lead, M, G], or 128x4-swizzled [*lead, 128 * ceil(M / 128), 4 * ceil(G / 4)]
            with padding 0, written here. Viewed as int32, the latter has the shape that vLLM gives it.

    Raises:
        LayoutError: an unknown layout, or a size that is negative.
    """
    codes = TensorSpec.of(Nibbles(rows, columns), lead=lead)
    scale = block_scale_spec(rows, -(-columns // group), scale_layout, lead=lead, extra_tiles=extra_tiles)
    return _pair(codes, scale, device, owner)


def mxfp8_output(
    rows: int,
    columns: int,
    *,
    scale_layout: BlockScaleLayout = "linear",
    lead: tuple[int, ...] = (),
    extra_tiles: int = 0,
    device: torch.device | str,
    owner: str,
) -> CodesAndScale:
    """E4M3 codes and one E8M0 byte for each 32 columns.

    Args:
        rows: M.
        columns: K.
        scale_layout: order of the scale bytes.
        lead: leading dimensions.
        extra_tiles: swizzled only: row tiles after the last.
        device: where.
        owner: who has to write codes and scales.

    Returns:
        codes: uint8 [*lead, M, K].
        scale: uint8, as `fp4_output` has it, G = ceil(K / 32).

    Raises:
        LayoutError: an unknown layout, or a size that is negative.
    """
    codes = TensorSpec.of(RowMajor(rows, columns), lead=lead)
    scale = block_scale_spec(
        rows, -(-columns // MXFP8_GROUP), scale_layout, lead=lead, extra_tiles=extra_tiles
    )
    return _pair(codes, scale, device, owner)


def fp8_token_output(
    rows: int, columns: int, *, lead: tuple[int, ...] = (), device: torch.device | str, owner: str
) -> CodesAndScale:
    """E4M3 codes and one float32 decode scale a row.

    Args:
        rows: M.
        columns: K.
        lead: leading dimensions.
        device: where.
        owner: who has to write codes and scales.

    Returns:
        codes: uint8 [*lead, M, K].
        scale: float32 [*lead, M, 1]. No padding.
    """
    codes = TensorSpec.of(RowMajor(rows, columns), lead=lead)
    scale = TensorSpec.of(RowMajor(rows, 1, value=1.0), torch.float32, lead)
    return _pair(codes, scale, device, owner)


def fp8_group_output(
    rows: int,
    columns: int,
    *,
    scale_layout: GroupScaleLayout = "row_major",
    group: int = FP8_GROUP,
    lead: tuple[int, ...] = (),
    device: torch.device | str,
    owner: str,
) -> CodesAndScale:
    """E4M3 codes and one decode scale for each row and `group` columns.

    Args:
        rows: M.
        columns: K.
        scale_layout: "row_major": float32. "mn_major": float32, column by column, columns 16-byte aligned.
            "ue8m0_words": exponents, four to an int32, words as in "mn_major".
        group: columns that share a scale; the last group of a row may be part-filled.
        lead: leading dimensions, such as a batch.
        device: where.
        owner: who has to write codes and scales.

    Returns:
        codes: uint8 [*lead, M, K].
        scale: [*lead, M, G] float32, strides (G, 1) or (1, A) with A = 4 * ceil(M / 4); or [*lead, M, ceil(G
            / 4)] int32, strides (1, A). Rows M..A hold 1.0, or exponents 0; lanes after group G hold 0; all
            written here. A producer that writes whole words writes 0 to those lanes too.

    Raises:
        LayoutError: an unknown layout, or a size that is negative.
    """
    G = -(-columns // group)
    orders: dict[str, tuple[Order, torch.dtype]] = {
        "row_major": (RowMajor(rows, G, value=1.0), torch.float32),
        "mn_major": (MNMajor(rows, G), torch.float32),
        "ue8m0_words": (UE8M0Words(rows, G), torch.int32),
    }
    order, dtype = _choose(orders, scale_layout, owner)
    codes = TensorSpec.of(RowMajor(rows, columns), lead=lead)
    return _pair(codes, TensorSpec.of(order, dtype, lead), device, owner)


def attention_output(
    parts: Mapping[str, tuple[int, int]],
    *,
    rows: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    padded_rows: int | None = None,
    device: torch.device | str,
    owner: str,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One output for a mixed batch, and views that tile its rows: each kernel writes its own view, whole.

    Args:
        parts: first and last-plus-one row of each part, such as {"decode": (0, 7), "prefill": (7, 300)}.
        rows: tokens of the batch.
        heads: query heads.
        head_dim: width of a head.
        dtype: float32, bfloat16 or float16.
        padded_rows: rows in all, where a captured graph rounds the batch up; rows after `rows` hold 0,
            written here.
        device: where.
        owner: who has to write; a part's writer is the kernel of its name.

    Returns:
        whole: [padded_rows, heads, head_dim].
        views: by part, [stop - start, heads, head_dim] of `whole`.

    Raises:
        LayoutError: the parts overlap or leave a gap in 0..rows.
    """
    check_tiling(rows, parts, where=owner)
    order = RowMajor(rows, heads * head_dim, padded_rows=rows if padded_rows is None else padded_rows)
    whole = allocate(TensorSpec.of(order, dtype), device=device, owner=owner)
    whole = whole.view(order.shape[0], heads, head_dim)
    return whole, {name: whole[start:stop] for name, (start, stop) in parts.items()}


def overwritten_output(
    shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device | str, owner: str
) -> Tensor:
    """A contiguous output whose next assignment writes every element: a copy, a matrix product, a kernel.

    This is what takes the place of `torch.zeros(...)` before such an assignment. An assignment that leaves
    elements out is found by the audit.

    Args:
        shape: of the output.
        dtype: uint8, int32, float32, bfloat16 or float16.
        device: where.
        owner: who overwrites it.

    Returns:
        An uninitialised tensor without padding.
    """
    spec = TensorSpec(shape, dtype, padding="none: the next assignment writes every element")
    return allocate(spec, device=device, owner=owner)


def block_scale_spec(
    rows: int, groups: int, layout: str, *, lead: tuple[int, ...] = (), extra_tiles: int = 0
) -> TensorSpec:
    """The spec of one scale byte a row and group, linear or 128x4-swizzled.

    Args:
        rows: M.
        groups: G.
        layout: "linear" or "swizzled_128x4".
        lead: leading dimensions.
        extra_tiles: swizzled only: row tiles after the last.

    Raises:
        LayoutError: an unknown layout, or a size that is negative.
    """
    orders: dict[str, Order] = {
        "linear": RowMajor(rows, groups),
        "swizzled_128x4": Swizzle128x4(rows, groups, extra_tiles),
    }
    return TensorSpec.of(_choose(orders, layout, "block_scale_spec"), lead=lead)


def _choose(choices: Mapping[str, _Choice], layout: str, owner: str) -> _Choice:
    if layout not in choices:
        raise LayoutError(
            "There is no such scale layout.",
            where=owner,
            found=repr(layout),
            need=f"one of {', '.join(map(repr, choices))}",
            remedy="use the layout that the kernel which reads the scales asks for",
        )
    return choices[layout]


def _pair(codes: TensorSpec, scale: TensorSpec, device: torch.device | str, owner: str) -> CodesAndScale:
    return CodesAndScale(
        allocate(codes, device=device, owner=f"{owner}, codes"),
        allocate(scale, device=device, owner=f"{owner}, scale"),
    )
