"""The weight-only operators `torch.ops.olq.matmul_*`: kernels where there are some, else decoded bands."""

import torch
from torch import Tensor

from olq import ops as _ops  # noqa: F401  (declares the operators)
from olq.forward.facts import Weight


def weight_only(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W.T + bias`, one rounding at the end: `olq.ops.linear` says how exact W is.

    Args:
        weight: of fp8, mxfp8 or nvfp4, without leading dimensions.
        x: [..., K], bfloat16, float16 or float32.
        bias: [N], dtype of x, or None.

    Returns:
        [..., N], dtype of x, contiguous.
    """
    tensors, ops = weight.tensors, torch.ops.olq
    x2 = weight.matrix(x)
    parts, starts = list(weight.parts), list(weight.starts)
    if weight.method == "fp8":
        y = ops.matmul_fp8(x2, tensors[""], tensors["_scale"], bias, parts, starts, *weight.block)
    elif weight.method == "mxfp8":
        layout = weight.params.scale_layout
        y = ops.matmul_mxfp8(x2, tensors[""], tensors["_scale"], bias, parts, starts, layout)
    else:
        scales, layout = (tensors["_scale"], tensors["_scale_2"]), weight.params.scale_layout
        y = ops.matmul_nvfp4(x2, tensors[""], *scales, bias, parts, starts, layout)
    return y.view(*x.shape[:-1], weight.rows)
