"""Scale bytes of formats with blocks along a row (mxfp8, nvfp4): their spec, their padding, and reading them back.

Layouts   `linear`: uint8 [*lead, R, C], row-major. `swizzled_128x4`: the same bytes in the order of tensor-core
          kernels, padded to [*lead, 128 * ceil(R / 128), 4 * ceil(C / 4)] (docs/formats/layouts.md).
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from olq.alloc import TensorSpec
from olq.layout import swizzle
from olq.methods.base import Target, WeightPlan
from olq.numerics.swizzle import flat_index

ScaleLayout = Literal["linear", "swizzled_128x4"]


def scale_spec(lead: tuple[int, ...], rows: int, blocks: int, layout: ScaleLayout) -> TensorSpec:
    """Spec of the scale bytes of a weight with `rows` kernel rows and `blocks` blocks a row."""
    shape = (rows, blocks) if layout == "linear" else swizzle.padded_shape(rows, blocks)
    return TensorSpec((*lead, *shape), torch.uint8, layout=layout, padding="0x00")


def position(plan: WeightPlan, target: Target) -> tuple[int, int, int]:
    """(row, row step, block column) of the first scale of `target`."""
    row = plan.kernel_starts[target.part] + target.rows.start
    return row, target.rows.step, target.columns.start // plan.block[1]


def read(scale: Tensor, plan: WeightPlan, target: Target, blocks: int, layout: ScaleLayout) -> Tensor:
    """The scale bytes of `target`, [*lead, n, g], as a view (linear) or a copy (swizzled).

    Args:
        scale: the weight's whole scale tensor.
        plan: the weight's plan.
        target: whole blocks.
        blocks: blocks a row, over the whole weight.
        layout: the scale tensor's layout.
    """
    row, step, column = position(plan, target)
    count, width = len(target.rows), -(-len(target.columns) // plan.block[1])
    scale = scale[target.lead]
    if layout == "linear":
        return scale[..., row : row + count * step : step, column : column + width]
    rows = torch.arange(row, row + count * step, step, device=scale.device)
    columns = torch.arange(column, column + width, device=scale.device)
    return scale.flatten(-2)[..., flat_index(rows[:, None], columns[None, :], blocks)]


def pad_(tensors: Mapping[str, Tensor], plan: WeightPlan, blocks: int, layout: ScaleLayout) -> None:
    """Write 0 to each byte of `tensors["_scale"]` that belongs to no block of the logical weight.

    Args:
        tensors: kernel tensors by suffix.
        plan: the weight's plan.
        blocks: blocks a row of the unpadded scale matrix, those of padding columns included.
        layout: the scale tensor's layout.
    """
    scale = tensors["_scale"]
    height, width = scale.shape[-2:]
    rows, used = plan.geometry.rows, -(-plan.geometry.columns // plan.block[1])
    if layout == "linear":
        scale[..., rows:, :] = 0
        scale[..., used:] = 0
        return
    flat = scale.flatten(-2)
    every_row = torch.arange(height, device=scale.device)[:, None]
    every_column = torch.arange(width, device=scale.device)[None, :]
    flat[..., flat_index(every_row[rows:], every_column, blocks)] = 0
    flat[..., flat_index(every_row, every_column[:, used:], blocks)] = 0
