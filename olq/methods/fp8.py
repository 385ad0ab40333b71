"""fp8: E4M3 codes with one float32 decode scale per tensor, output channel or 128x128 block.

Kernel tensors   `weight` uint8 [*lead, R, C], E4M3 bytes; R and C are N and K padded to 16 (and parts to the grid).
                 `weight_scale` float32: tensor [*lead, P], one a part; channel [*lead, R, 1];
                 block [*lead, rows of blocks over all parts, ceil(K / 128)].
Spec             docs/formats/fp8.md
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from olq.alloc import TensorSpec
from olq.methods.base import Call, ForwardParams, Geometry, QuantMethod, Target, WeightPlan, format_tag
from olq.methods.kernel_format import (
    code_spec,
    codes_of,
    numbers,
    pad_matrix_,
    place_parts,
    round_up,
    shifted,
)
from olq.registry import register_method

#: Rows and columns of the elements that share a scale; 0 is the part's whole extent.
BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128)}

_COLUMN_ALIGNMENT = 16


class Fp8Params(ForwardParams):
    """Parameters of `fp8`.

    Args:
        granularity: what shares one scale: a part of the tensor, an output channel (row), or a 128x128 block.
        scale: `float32` divides amax by 448; `power_of_two` takes the least power of two without saturation.
        scale_sharing: `part` gives each part of a fused layer its own per-tensor scale; `common` one to all.
        activations: what a float32 scale of x covers where x is quantized too: all of x, a row (token), or a row and
            128 columns (group); its rule is that of `scale`.
        path, nonfinite, source_precision: see `ForwardParams`.
    """

    granularity: Literal["tensor", "channel", "block"] = "channel"
    scale: Literal["float32", "power_of_two"] = "float32"
    scale_sharing: Literal["part", "common"] = "part"
    activations: Literal["none", "tensor", "token", "group"] = "none"


@register_method("fp8")
class Fp8(QuantMethod):
    """E4M3 codes, float32 decode scales."""

    Params = Fp8Params
    params: Fp8Params

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> WeightPlan:
        """See `QuantMethod.plan`."""
        block = BLOCKS[self.params.granularity]
        if self.params.granularity == "tensor" and self.params.scale_sharing == "common":
            geometry = Geometry(geometry.lead, (geometry.rows,), geometry.columns)
        lead, parts, columns = geometry.lead, geometry.parts, geometry.columns
        starts, rows = place_parts(parts, max(block[0], 1))
        if self.params.granularity == "tensor":
            scale_shape = (len(parts),)
        elif self.params.granularity == "channel":
            scale_shape = (rows, 1)
        else:
            scale_shape = (-(-(starts[-1] + parts[-1]) // 128) if parts else 0, -(-columns // 128))
        return WeightPlan(
            geometry=geometry,
            dtype=dtype,
            unit=block,
            block=block,
            kernel_starts=starts,
            tensors={
                "": code_spec(lead, rows, round_up(columns, _COLUMN_ALIGNMENT), padding="0x00"),
                "_scale": TensorSpec((*lead, *scale_shape), torch.float32, padding="1.0"),
            },
            tag=format_tag(self, geometry, dtype),
        )

    judges_later = True

    def quantize_(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> bool:
        """See `QuantMethod.quantize_`."""
        self.write_(source, tensors, plan, target)
        return bool(self._scale(tensors, plan, target).isfinite().all())

    def calls(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> tuple[Call]:
        """See `QuantMethod.calls`."""
        arguments = (
            source,
            codes_of(tensors, plan, target),
            self._scale(tensors, plan, target),
            *plan.block,
            self.params.scale == "power_of_two",
            plan.dtype if self.params.source_precision == "parameter" else None,
            self.params.nonfinite == "saturate",
        )
        return (("quantize_fp8_", arguments),)

    def finite(self, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """See `QuantMethod.finite`."""
        return numbers([weight["_scale"] for weight in weights])

    def dequantize_(
        self, out: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> None:
        """See `QuantMethod.dequantize_`."""
        codes, scale = codes_of(tensors, plan, target), self._scale(tensors, plan, target)
        torch.ops.olq.dequantize_fp8_(codes, scale, out, *plan.block)

    def write_padding_(self, tensors: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """Codes 0, scales 1.0, also those of rows, and the one of a part, without elements."""
        parts, starts = plan.geometry.parts, plan.kernel_starts
        pad_matrix_(tensors[""], parts, starts, plan.geometry.columns, 0)
        if self.params.granularity == "channel":
            pad_matrix_(tensors["_scale"], parts, starts, 1, 1.0)
            if not plan.geometry.columns:
                tensors["_scale"].fill_(1.0)
        elif self.params.granularity == "tensor":
            for part, rows in enumerate(parts):
                if not rows or not plan.geometry.columns:
                    tensors["_scale"][..., part] = 1.0

    def _scale(self, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target) -> Tensor:
        """View [*lead, blocks down, blocks across] of the scales of `target`."""
        scale = tensors["_scale"][target.lead]
        if self.params.granularity == "tensor":
            return scale[..., target.part, None, None]
        start = plan.kernel_starts[target.part]
        if self.params.granularity == "channel":
            return scale[..., shifted(target.rows, start), :]
        rows = slice((start + target.rows.start) // 128, -(-(start + target.rows.stop) // 128))
        return scale[..., rows, target.columns.start // 128 : -(-target.columns.stop // 128)]
