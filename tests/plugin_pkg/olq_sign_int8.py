"""sign_int8: signed 8-bit integers, two's complement, with one float32 decode scale for each row.

Kernel tensors   `weight` uint8 [*lead, N, K], the bytes of int8; `weight_scale` float32 [*lead, N, 1].
Rule             scale = amax / levels, never below 2**-126, 1.0 for a row of zeros;
                 code = round(x / scale) to the nearest, ties to even.
"""

from collections.abc import Iterator, Mapping

import torch
from pydantic import Field
from torch import Tensor

from olq.alloc import TensorSpec
from olq.methods import Geometry, MethodParams, QuantMethod, Target, WeightPlan
from olq.methods.base import format_tag

#: Elements that are worked on at once; bounds the scratch to a few megabytes for a weight of any size.
CHUNK = 1 << 18


class SignInt8Params(MethodParams):
    """Parameters of `sign_int8`.

    Args:
        levels: the largest code; 127 uses all bits, 7 would fit into four of them.
    """

    levels: int = Field(127, ge=1, le=127)


class SignInt8(QuantMethod):
    """Signed 8-bit integers, one scale a row."""

    Params = SignInt8Params
    params: SignInt8Params

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> WeightPlan:
        """A row is a scale unit; nothing is padded."""
        return WeightPlan(
            geometry=geometry,
            dtype=dtype,
            unit=(1, 0),
            block=(1, 0),
            kernel_starts=geometry.starts,
            tensors={
                "": TensorSpec(geometry.shape, torch.uint8),
                "_scale": TensorSpec((*geometry.lead, geometry.rows, 1), torch.float32),
            },
            tag=format_tag(self, geometry, dtype),
        )

    def quantize_(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> bool:
        """Write whole rows, some at a time."""
        codes, scale = _rows(tensors, plan, target)
        finite = True
        for some in _chunks(source):
            # Rounded to the parameter's dtype first, as `copy_` would; the arithmetic is float32.
            x = source[..., some, :].to(codes.device, plan.dtype).float()
            levels = x.new_tensor(self.params.levels)  # a Python number would become a reciprocal on CUDA
            amax = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
            s = torch.where(amax == 0, 1.0, (amax / levels).clamp_min(2.0**-126))
            q = (x / s).round_().clamp_(-levels, levels).nan_to_num_()
            codes[..., some, :] = q.to(torch.int8).view(torch.uint8)
            scale[..., some, :] = s
            finite = finite and bool(s.isfinite().all())
        return finite

    def dequantize_(
        self, out: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> None:
        """code * scale, in float32."""
        codes, scale = _rows(tensors, plan, target)
        for some in _chunks(out):
            out[..., some, :] = codes[..., some, :].view(torch.int8).float() * scale[..., some, :]

    def write_padding_(self, tensors: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """There is none."""


def _rows(tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target) -> tuple[Tensor, Tensor]:
    """Views of the codes and scales of the target's rows."""
    start, rows = plan.kernel_starts[target.part], target.rows
    place = (*target.lead, slice(start + rows.start, start + rows.stop, rows.step))
    return tensors[""][place], tensors["_scale"][place]


def _chunks(weight: Tensor) -> Iterator[slice]:
    rows = weight.shape[-2]
    step = max(CHUNK * rows // max(weight.numel(), 1), 1)
    return (slice(start, start + step) for start in range(0, rows, step))
