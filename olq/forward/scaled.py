"""What the paths through torch.nn.functional.scaled_mm share: its arguments by name, and what is read of its result.

`torch._scaled_mm` of the same build takes fewer arguments and infers the recipe from shapes, which for one row, or one
part, are those of two recipes.

Letters   M' = rows of the left operand; R, C = rows and columns of the weight's codes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType


class Operands(NamedTuple):
    """What scaled_mm is given, apart from bias and dtype: a [M', C] times b [C, R]."""

    a: Tensor
    b: Tensor
    scale_a: list[Tensor]
    recipe_a: list[ScalingType]
    scale_b: list[Tensor]
    recipe_b: list[ScalingType]
    swizzle: list[SwizzleType]


def widened(x: Tensor, columns: int) -> Tensor:
    """x with zeros up to the columns of the kernel format: quantized to zeros, they leave every scale as it is."""
    return x if x.shape[1] == columns else functional.pad(x, (0, columns - x.shape[1]))


def multiply(operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scaled_mm of the operands, summed in float32, [M', R]."""
    a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle = operands
    return functional.scaled_mm(
        a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle, swizzle, bias, output_dtype=dtype
    )


def logical(y: Tensor, rows: int, parts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The rows of x and the columns of parts, contiguous: [M', R] to [M, N]."""
    y = y[:rows]
    if packed(parts, starts):
        return y[:, : sum(parts)].contiguous()
    return torch.cat([y[:, start : start + n] for n, start in zip(parts, starts, strict=True)], dim=1)


def packed(parts: Sequence[int], starts: Sequence[int]) -> bool:
    """Whether no rows lie between parts."""
    return all(start == sum(parts[:i]) for i, start in enumerate(starts))
