"""A layer as an engine would write it, whose loader writes any region; and what it holds, as bytes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from olq.methods.base import QuantMethod
from olq.reload.api import finalize_layerwise_processing, initialize_online_processing
from olq.reload.region import Box, slices


class RegionLayer(nn.Module):
    """A layer with one weight; `weight.weight_loader(weight, tensor, box)` copies a tensor into a region of it.

    Args:
        method: stores the weight.
        parts: rows of each part.
        columns: K.
        lead: expert dimensions.
        dtype: of the load format.
    """

    def __init__(
        self,
        method: QuantMethod,
        parts: Sequence[int],
        columns: int,
        lead: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.quant_method = method
        method.create_weights(
            self, columns, parts, dtype=dtype, weight_loader=self.weight_loader, lead=lead, label="layer"
        )

    @staticmethod
    def weight_loader(parameter: Tensor, tensor: Tensor, box: Box | None = None) -> None:
        """Copy into a region; None is the whole parameter."""
        (parameter if box is None else parameter[slices(box)]).copy_(tensor)


def load_by(layer: nn.Module, weight: Tensor, boxes: Iterable[Box]) -> nn.Module:
    """Load a `RegionLayer` that is not live through its loader, one box after the other.

    Args:
        layer: not loaded yet, or opened by `olq.initialize_layerwise_reload`.
        weight: all of the weight.
        boxes: a partition of it, in the order of arrival. Each source is overwritten after its call.
    """
    initialize_online_processing(layer)
    parameter = dict(layer.named_parameters())["weight"]
    for box in boxes:
        source = weight[slices(box)].clone()
        parameter.weight_loader(parameter, source, box)  # type: ignore[attr-defined]
        source.fill_(float("nan"))
    finalize_layerwise_processing(layer)
    return layer


def kernel_bytes(layer: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer of a module, as bytes."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {
        name: bytes(t.detach().contiguous().flatten().view(torch.uint8).tolist())
        for name, t in tensors.items()
    }
