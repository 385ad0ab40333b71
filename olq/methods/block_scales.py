"""Scale bytes of formats with blocks along a row (mxfp8, nvfp4): their spec, their padding, and reading them back.

Layouts   `linear`: uint8 [*lead, R, C], row-major. `swizzled_128x4`: the same bytes in the order of tensor-core
          kernels, padded to [*lead, 128 * ceil(R / 128), 4 * ceil(C / 4)] (docs/formats/layouts.md).
"""

from typing import Literal

import torch
from torch import Tensor

from olq.alloc import TensorSpec, write_padding_
from olq.layout import Swizzle128x4
from olq.methods.base import Target, WeightPlan
from olq.methods.kernel_format import ROW_ALIGNMENT, round_up
from olq.numerics.swizzle import flat_index

ScaleLayout = Literal["linear", "swizzled_128x4"]


def scale_spec(lead: tuple[int, ...], rows: int, used: int, blocks: int, layout: ScaleLayout) -> TensorSpec:
    """Spec of the scale bytes of a weight.

    Args:
        lead: leading dimensions.
        rows: logical rows.
        used: blocks a row that hold a logical column.
        blocks: blocks a row of the kernel format.
        layout: order of the bytes.
    """
    if layout == "linear":
        return TensorSpec((*lead, round_up(rows, ROW_ALIGNMENT), blocks), torch.uint8, padding="0x00")
    return TensorSpec.of(Swizzle128x4(rows, used), lead=lead)


def position(plan: WeightPlan, target: Target) -> tuple[int, int, int]:
    """(row, row step, block column) of the first scale of `target`."""
    row = plan.kernel_starts[target.part] + target.rows.start
    return row, target.rows.step, target.columns.start // plan.block[1]


def read(scale: Tensor, plan: WeightPlan, target: Target, layout: ScaleLayout) -> Tensor:
    """The scale bytes of `target`, [*lead, n, g], as a view (linear) or a copy (swizzled).

    Args:
        scale: the weight's whole scale tensor.
        plan: the weight's plan.
        target: whole blocks.
        layout: the scale tensor's layout.
    """
    row, step, column = position(plan, target)
    count, width = len(target.rows), -(-len(target.columns) // plan.block[1])
    scale = scale[target.lead]
    if layout == "linear":
        return scale[..., row : row + count * step : step, column : column + width]
    rows = torch.arange(row, row + count * step, step, device=scale.device)
    columns = torch.arange(column, column + width, device=scale.device)
    return scale.flatten(-2)[..., flat_index(rows[:, None], columns[None, :], scale.shape[-1])]


def pad_(scale: Tensor, plan: WeightPlan, layout: ScaleLayout) -> None:
    """Write 0 to each scale byte that belongs to no block of the logical weight."""
    if layout == "linear":
        rows, blocks = plan.geometry.rows, -(-plan.geometry.columns // plan.block[1])
        if rows < scale.shape[-2]:
            scale[..., rows:, :] = 0
        if blocks < scale.shape[-1]:
            scale[..., blocks:] = 0
    else:
        write_padding_(scale, plan.tensors["_scale"])
