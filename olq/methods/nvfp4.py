"""nvfp4: E2M1 codes with one E4M3 decode scale for each 16 columns and one float32 decode scale for each part.

Kernel tensors   `weight` uint8 [*lead, R, C / 2], two codes a byte, low nibble first; R is N padded to 16, C is K
                 padded to 32. `weight_scale` uint8, E4M3 bytes, [*lead, R, C / 16] or swizzled.
                 `weight_scale_2` float32 [*lead, P], one a part.
Unit             a whole part: its scales depend on the largest value of all of it.
Spec             docs/formats/nvfp4.md
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from olq.alloc import TensorSpec
from olq.methods import block_scales
from olq.methods.base import Call, ForwardParams, Geometry, QuantMethod, Target, WeightPlan, format_tag
from olq.methods.kernel_format import code_spec, codes_of, numbers, pad_matrix_, place_parts, round_up
from olq.registry import register_method

BLOCK = 16
_COLUMN_ALIGNMENT = 32


class Nvfp4Params(ForwardParams):
    """Parameters of `nvfp4`.

    Args:
        scale_sharing: `part` gives each part of a fused layer its own tensor scale; `common` one to all, for
            kernels that take a single factor.
        scale_layout: order of the block scales.
        activations: `group` quantizes x too, 16 columns a scale byte, and a tensor scale from all of x.
        path, nonfinite, source_precision: see `ForwardParams`.
    """

    scale_sharing: Literal["part", "common"] = "part"
    scale_layout: block_scales.ScaleLayout = "linear"
    activations: Literal["none", "group"] = "none"


@register_method("nvfp4")
class Nvfp4(QuantMethod):
    """E2M1 codes, E4M3 block scales, float32 tensor scales."""

    Params = Nvfp4Params
    params: Nvfp4Params

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> WeightPlan:
        """See `QuantMethod.plan`."""
        if self.params.scale_sharing == "common":
            geometry = Geometry(geometry.lead, (geometry.rows,), geometry.columns)
        starts, rows = place_parts(geometry.parts, 1)
        columns = round_up(geometry.columns, _COLUMN_ALIGNMENT)
        return WeightPlan(
            geometry=geometry,
            dtype=dtype,
            unit=(0, 0),
            block=(1, BLOCK),
            kernel_starts=starts,
            tensors={
                "": code_spec(geometry.lead, rows, columns // 2, padding="0x00"),
                "_scale": block_scales.scale_spec(
                    geometry.lead,
                    geometry.rows,
                    -(-geometry.columns // BLOCK),
                    columns // BLOCK,
                    self.params.scale_layout,
                ),
                "_scale_2": TensorSpec((*geometry.lead, len(geometry.parts)), torch.float32),
            },
            tag=format_tag(self, geometry, dtype),
        )

    judges_later = True

    def quantize_(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> bool:
        """See `QuantMethod.quantize_`."""
        self.write_(source, tensors, plan, target)
        return bool(tensors["_scale_2"][target.lead][..., target.part].isfinite().all())

    def calls(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> tuple[Call, Call]:
        """See `QuantMethod.calls`. Two passes over the source: its largest value, then its codes."""
        through = plan.dtype if self.params.source_precision == "parameter" else None
        saturate = self.params.nonfinite == "saturate"
        scale_2 = tensors["_scale_2"][target.lead][..., target.part]
        arguments = (
            source,
            codes_of(tensors, plan, target, codes_a_byte=2),
            tensors["_scale"][target.lead],
            scale_2,
            self.params.scale_layout,
            *block_scales.position(plan, target),
            through,
            saturate,
        )
        return ("nvfp4_tensor_scale_", (source, scale_2, through, saturate)), ("quantize_nvfp4_", arguments)

    def finite(self, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """See `QuantMethod.finite`."""
        return numbers([weight["_scale_2"] for weight in weights])

    def dequantize_(
        self, out: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> None:
        """See `QuantMethod.dequantize_`."""
        torch.ops.olq.dequantize_nvfp4_(
            codes_of(tensors, plan, target, codes_a_byte=2),
            tensors["_scale"][target.lead],
            tensors["_scale_2"][target.lead][..., target.part],
            out,
            self.params.scale_layout,
            *block_scales.position(plan, target),
        )

    def write_padding_(self, tensors: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """Codes 0, block scales 0, `weight_scale_2` 1.0 for a part without elements.

        The high nibble after an odd last column is written with the codes.
        """
        codes = tensors[""]
        pad_matrix_(codes, plan.geometry.parts, plan.kernel_starts, -(-plan.geometry.columns // 2), 0)
        block_scales.pad_(tensors["_scale"], plan, self.params.scale_layout)
        for part, rows in enumerate(plan.geometry.parts):
            if not rows or not plan.geometry.columns:
                tensors["_scale_2"][..., part] = 1.0
