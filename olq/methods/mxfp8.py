"""mxfp8: E4M3 codes with one E8M0 decode scale for each 32 columns.

Kernel tensors   `weight` uint8 [*lead, R, C], E4M3 bytes; R is N padded to 16, C is K padded to 32.
                 `weight_scale` uint8, E8M0 bytes, [*lead, R, C / 32] or swizzled.
Spec             docs/formats/mxfp8.md
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from olq.methods import block_scales
from olq.methods.base import Call, ForwardParams, Geometry, QuantMethod, Target, WeightPlan, format_tag
from olq.methods.kernel_format import code_spec, codes_of, pad_matrix_, place_parts, round_up
from olq.registry import register_method

BLOCK = 32
_NAN_BYTE = 255


class Mxfp8Params(ForwardParams):
    """Parameters of `mxfp8`.

    Args:
        rule: how a block's exponent follows from its largest value: `RCEIL` is the least without saturation.
        scale_layout: order of the scale bytes.
        activations: `group` quantizes x too, 32 columns a scale byte, by `rule`.
        path, nonfinite, source_precision: see `ForwardParams`.
    """

    rule: Literal["RCEIL", "FLOOR", "CEIL", "EVEN"] = "RCEIL"
    scale_layout: block_scales.ScaleLayout = "linear"
    activations: Literal["none", "group"] = "none"


@register_method("mxfp8")
class Mxfp8(QuantMethod):
    """E4M3 codes, E8M0 decode scales, blocks of 32."""

    Params = Mxfp8Params
    params: Mxfp8Params

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> WeightPlan:
        """See `QuantMethod.plan`."""
        starts, rows = place_parts(geometry.parts, 1)
        columns = round_up(geometry.columns, BLOCK)
        return WeightPlan(
            geometry=geometry,
            dtype=dtype,
            unit=(1, BLOCK),
            block=(1, BLOCK),
            kernel_starts=starts,
            tensors={
                "": code_spec(geometry.lead, rows, columns, padding="0x00"),
                "_scale": block_scales.scale_spec(
                    geometry.lead,
                    geometry.rows,
                    -(-geometry.columns // BLOCK),
                    columns // BLOCK,
                    self.params.scale_layout,
                ),
            },
            tag=format_tag(self, geometry, dtype),
        )

    judges_later = True

    def quantize_(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> bool:
        """See `QuantMethod.quantize_`."""
        self.write_(source, tensors, plan, target)
        scales = block_scales.read(tensors["_scale"], plan, target, self.params.scale_layout)
        return not bool((scales == _NAN_BYTE).any())

    def calls(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> tuple[Call]:
        """See `QuantMethod.calls`."""
        arguments = (
            source,
            codes_of(tensors, plan, target),
            tensors["_scale"][target.lead],
            self.params.rule,
            self.params.scale_layout,
            *block_scales.position(plan, target),
            plan.dtype if self.params.source_precision == "parameter" else None,
            self.params.nonfinite == "saturate",
        )
        return (("quantize_mxfp8_", arguments),)

    def finite(self, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """See `QuantMethod.finite`."""
        scales = [weight["_scale"].detach() for weight in weights]
        if all(
            scale.numel() for scale in scales
        ):  # the largest byte of each, in a few launches for all of them
            return torch.stack(torch.ops.aten._foreach_max(scales)) != _NAN_BYTE
        return torch.stack([(scale != _NAN_BYTE).all() for scale in scales])

    def dequantize_(
        self, out: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> None:
        """See `QuantMethod.dequantize_`."""
        torch.ops.olq.dequantize_mxfp8_(
            codes_of(tensors, plan, target),
            tensors["_scale"][target.lead],
            out,
            self.params.scale_layout,
            *block_scales.position(plan, target),
        )

    def write_padding_(self, tensors: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """Codes 0, scale bytes 0."""
        pad_matrix_(tensors[""], plan.geometry.parts, plan.kernel_starts, plan.geometry.columns, 0)
        block_scales.pad_(tensors["_scale"], plan, self.params.scale_layout)
