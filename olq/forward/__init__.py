"""How `x @ W.T + bias` is computed with a quantized weight, and which way a call takes.

    path(layer, x)   the way that one call takes, and why, without taking it
    table()          all ways: for which device, method, dtype of x and number of rows each holds

The method's parameter `activations` says what is computed: "none" leaves x as it is, other values quantize it too. The
parameter `path` says how: "auto" is the first row of the table that holds; a name asks for that path, and where it
can't be had the call raises. No path waits for a GPU, and each reads the kernel tensors in place, so that a CUDA graph
that was captured before a reload computes with the new weights after it.

facts        what a path is chosen by
rows         the table
choice       asking it
reference, matmul, scaled_fp8, scaled_blocks    the paths
activations  quantizing x
"""

from typing import Protocol

from torch import Tensor, nn

from olq.forward.choice import Path, check_asked, choose, explain, input_of, not_quantized
from olq.forward.facts import Weight
from olq.forward.rows import NEEDS, TABLE, names

__all__ = ["Path", "Weight", "check_asked", "linear", "path", "table"]


class _Stores(Protocol):
    def stored(self, layer: nn.Module, name: str = "weight") -> Weight: ...


def linear(weight: Weight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ W.T + bias` on the path that `path` names.

    Args:
        weight: a live weight, as `QuantMethod.stored` describes it.
        x: [..., K].
        bias: [N] or None.

    Returns:
        [..., N], dtype of x.

    Raises:
        ConfigError: no row of the table holds, or none of the path that was asked for.
        LayoutError: the weight has leading dimensions, x has not K columns, or the bias does not fit.
    """
    return choose(weight, input_of(weight, x, bias)).run(weight, x, bias)


def path(layer: nn.Module, x: Tensor, bias: Tensor | None = None, *, name: str = "weight") -> Path:
    """Say which way `layer.quant_method.apply(layer, x, bias)` goes, without going it.

    Args:
        layer: a live layer with a quantized weight.
        x: a tensor [..., K] of the call's shape, dtype and `requires_grad`. Only looked at; the meta device
            will do.
        bias: [N] of the call's dtype and `requires_grad`, or None.
        name: the weight, where a layer has several.

    Raises:
        ConfigError: the call would raise it.
        LayoutError: likewise, or the layer has no such weight.
        StateError: the layer's weights are not all there.
    """
    method: _Stores | None = getattr(layer, "quant_method", None)
    if method is None:
        raise not_quantized(layer)
    weight = method.stored(layer, name)
    return explain(weight, input_of(weight, x, bias))


def table() -> str:
    """The table of paths, three lines a row, in the order in which they are asked; then what the needs are."""
    lines = []
    for row in TABLE:
        taken = "by default" if row.default else "by name"
        lines.append(f"{row.path:9}  {taken:10}  {row.what}")
        lines.append(f"{'':9}  {'on':10}  {row.where}, x in {names(row.dtypes)}, M {row.range}")
        lines.append(f"{'':9}  {'runs':10}  {row.how}")
        if row.needs:
            lines.append(f"{'':9}  {'needs':10}  {', '.join(need.name for need in row.needs)}")
    lines += [f"{need.name:9}  {need.text}" for need in NEEDS]
    return "\n".join(lines)
