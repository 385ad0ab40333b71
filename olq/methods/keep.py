"""keep: leave a layer in high precision, as a method, so that "not quantized" is a decision with a reason."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from olq.errors import LayoutError
from olq.methods.base import Geometry, QuantMethod, Target, WeightPlan
from olq.registry import register_method


@register_method("keep")
class Keep(QuantMethod):
    """The weight stays a parameter with memory of its own; the forward is `torch.nn.functional.linear`."""

    quantizes = False

    def plan(self, geometry: Geometry, dtype: torch.dtype) -> WeightPlan:
        """Nothing is planned: there is no kernel format."""
        raise self._no_kernel_format()

    def quantize_(
        self, source: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> bool:
        """Nothing is quantized."""
        raise self._no_kernel_format()

    def dequantize_(
        self, out: Tensor, tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target
    ) -> None:
        """Nothing is quantized."""
        raise self._no_kernel_format()

    def write_padding_(self, tensors: Mapping[str, Tensor], plan: WeightPlan) -> None:
        """Nothing is padded."""
        raise self._no_kernel_format()

    def apply(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, *, name: str = "weight"
    ) -> Tensor:
        """`x @ W.T + bias`."""
        return functional.linear(x, getattr(layer, name), bias)

    def _make_parameter(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        return nn.Parameter(torch.empty(geometry.shape, dtype=dtype, device=device), requires_grad=False)

    def _no_kernel_format(self) -> LayoutError:
        return LayoutError(
            "`keep` leaves weights as they are and has no kernel format.",
            where="method 'keep'",
            found="a call that plans or quantizes",
            need="a method whose `quantizes` is True",
            remedy="check `method.quantizes` before planning",
        )
