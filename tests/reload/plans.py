"""Write plans and layers that several test modules share."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.reload.region import Box, slices

#: Every built-in method with parameters that change units, scales or layouts.
METHODS: list[tuple[str, dict[str, str]]] = [
    ("fp8", {"granularity": "tensor"}),
    ("fp8", {"granularity": "tensor", "scale_sharing": "common"}),
    ("fp8", {"granularity": "channel"}),
    ("fp8", {"granularity": "block"}),
    ("fp8", {"granularity": "block", "scale": "power_of_two"}),
    ("mxfp8", {}),
    ("mxfp8", {"rule": "FLOOR", "scale_layout": "swizzled_128x4"}),
    ("nvfp4", {}),
    ("nvfp4", {"scale_sharing": "common", "scale_layout": "swizzled_128x4"}),
]


def method_id(value: tuple[str, dict[str, str]]) -> str:
    """A readable test id."""
    name, params = value
    return "-".join([name, *params.values()])


class RegionLayer(nn.Module):
    """An engine's layer whose loader writes any region: `loader(param, tensor, box)`."""

    def __init__(
        self, method: str, params: dict[str, str], parts: tuple[int, ...], columns: int, lead=()
    ) -> None:
        super().__init__()
        self.quant_method = olq.get_method(method, **params)
        self.quant_method.create_weights(
            self,
            columns,
            parts,
            dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
            lead=lead,
            label="layer",
        )

    @staticmethod
    def weight_loader(parameter: Tensor, tensor: Tensor, box: Box | None = None) -> None:
        """Copy into a region."""
        (parameter if box is None else parameter[slices(box)]).copy_(tensor)


def kernel_bytes(layer: nn.Module) -> dict[str, bytes]:
    """Every kernel tensor and tag, as bytes."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {
        name: bytes(t.detach().contiguous().flatten().view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


def load_by(layer: nn.Module, weight: Tensor, boxes: list[Box]) -> nn.Module:
    """Load a layer through its wrapped loader, one box after the other."""
    olq.initialize_online_processing(layer)
    parameter = dict(layer.named_parameters())["weight"]
    for box in boxes:
        parameter.weight_loader(parameter, weight[slices(box)].clone(), box)
    olq.finalize_layerwise_processing(layer)
    return layer


@st.composite
def bf16_weights(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Finite bfloat16 of very different sizes, some blocks of zeros; drawn from a seed, so that shrinking is fast."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = torch.randint(-20, 8, (*shape[:-1], 1), generator=generator).float().exp2()
    weight = torch.randn(shape, generator=generator) * scale
    weight[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.6]))] = 0.0
    return weight.bfloat16()


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], most: int = 10) -> list[Box]:
    """A partition of a tensor into boxes, some of them strided, in any order."""
    done: list[Box] = [tuple(range(n) for n in shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        box = done.pop(draw(st.integers(0, len(done) - 1)))
        done.extend(draw(_halves(box)))
    return draw(st.permutations(done))


@st.composite
def _halves(draw: st.DrawFn, box: Box) -> list[Box]:
    wide = [d for d, r in enumerate(box) if len(r) > 1]
    if not wide:
        return [box]
    d = draw(st.sampled_from(wide))
    r = box[d]
    if draw(st.integers(0, 3)) == 0:
        halves = [r[::2], r[1::2]]
    else:
        at = draw(st.integers(1, len(r) - 1))
        halves = [r[:at], r[at:]]
    return [(*box[:d], half, *box[d + 1 :]) for half in halves]


def row_boxes(parts: tuple[int, ...], columns: int) -> Iterator[Box]:
    """One box a part, as checkpoints store them."""
    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]
    for start, stop in pairwise(ends):
        yield range(start, stop), range(columns)
