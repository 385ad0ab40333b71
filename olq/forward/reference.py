"""The path that every method has on every device: decode bands of the weight, and let torch multiply.

Scratch: a band of decoded weight, 16 MiB of float32; with quantized activations, x in float32 beside it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from olq.forward.activations import rounded
from olq.forward.facts import Weight


def weight_only(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W.T + bias`, W decoded to the dtype of x (float64: through float32). Gradients flow to x and bias.

    Args:
        weight: without leading dimensions.
        x: [..., K].
        bias: [N], dtype of x, or None.

    Returns:
        [..., N], dtype of x.
    """
    outputs = []
    for start, w in weight.decoded(x.dtype, x.device):
        outputs.append(functional.linear(x, w, None if bias is None else bias[start : start + w.shape[0]]))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, dim=-1) if outputs else x.new_empty(*x.shape[:-1], 0)


def quantized(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """`Q(x) @ W.T + bias`: what quantized activations stand for, with W in float32.

    Products and sums in float32 (float64 for such x), one rounding to the dtype of x at the end.

    Args:
        weight: of a method whose `activations` is not "none", without leading dimensions.
        x: [..., K].
        bias: [N] or None. No gradient flows to it, nor to x.

    Returns:
        [..., N], dtype of x.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    xq = rounded(weight.matrix(x.detach()), weight).to(wide)
    with torch.autocast(x.device.type, enabled=False):  # which would round both operands again
        y = weight_only(weight, xq, None if bias is None else bias.detach().to(wide))
    return y.to(x.dtype).view(*x.shape[:-1], weight.rows)
