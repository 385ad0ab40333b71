"""Which row of the table a call takes, and why; and what is said where none holds."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from olq.errors import ConfigError, LayoutError
from olq.forward.facts import Input, Weight, capability
from olq.forward.rows import NUMBERS, TABLE, Row, name, names


@dataclass(frozen=True, slots=True)
class Path:
    """Which way one call goes.

    Args:
        name: "reference", "matmul" or "scaled_mm".
        how: what it runs, in words.
        reason: why this one: what rows of the table before it lack, or that it was asked for.
    """

    name: str
    how: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.how}): {self.reason}"


def input_of(weight: Weight, x: Tensor, bias: Tensor | None) -> Input:
    """The call `x @ W.T + bias`, for x [..., K].

    Raises:
        LayoutError: the weight has leading dimensions, x has not K columns, or the bias does not fit.
    """
    if weight.lead or not x.dim() or x.shape[-1] != weight.columns:
        raise _shapes(weight, x)
    device = weight.tensors[""].device if "" in weight.tensors else x.device
    autocast = torch.is_autocast_enabled(device.type)
    if bias is not None:
        _check_bias(weight, x, bias, autocast)
    return Input(
        device=device,
        capability=capability(device),
        dtype=x.dtype,
        tokens=x.shape[:-1].numel(),
        gradient=_gradient(weight, x, bias),
        bias=None if bias is None else bias.dtype,
        autocast=autocast,
    )


def _check_bias(weight: Weight, x: Tensor, bias: Tensor, autocast: bool) -> None:
    """Refuse what no path could add: a path that slices it, or converts it, would not notice."""
    if bias.shape != (weight.rows,):
        raise LayoutError(
            "The bias has not one element for each row of the weight.",
            where=weight.label,
            found=f"a bias of shape {list(bias.shape)}",
            need=f"[{weight.rows}]",
            remedy="pass the bias of this layer; a fused layer has one bias, the parts' one after the other",
        )
    # torch.autocast converts operands; with quantized activations float32 sums take any bias.
    same = weight.activations == "none" and not autocast
    dtypes = (x.dtype,) if same else NUMBERS
    if bias.dtype not in dtypes:
        raise LayoutError(
            "The bias has not a dtype in which it can be added.",
            where=weight.label,
            found=f"a bias in {name(bias.dtype)}, x in {name(x.dtype)}",
            need=f"a bias in {names(dtypes)}",
            remedy="convert the bias, or x, before the call: bias.to(x.dtype)",
        )


def _gradient(weight: Weight, x: Tensor, bias: Tensor | None) -> str | None:
    """What asks for a gradient, in words. With quantized activations no path gives the bias one, so that what a
    training loop left on it does not matter there.
    """
    if torch.is_grad_enabled():
        if x.requires_grad:
            return "x that requires grad, in grad mode"
        if bias is not None and bias.requires_grad and weight.activations == "none":
            return "a bias that requires grad, in grad mode"
    # Without a level of forward mode that is open, unpack_dual looks at nothing.
    for what, tensor in (("x", x), ("a bias", bias)):
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            return f"{what} with a tangent of torch.autograd.forward_ad"
    return None


def choose(weight: Weight, given: Input) -> Row:
    """The first row that holds.

    Raises:
        ConfigError: none does.
    """
    for row in TABLE:
        if _may(row, weight) and row.lacks(weight, given) is None:
            return row
    raise _no_path(weight, given)


def explain(weight: Weight, given: Input) -> Path:
    """`choose`, in words."""
    row = choose(weight, given)
    if weight.asked != "auto":
        return Path(row.path, row.how, f"asked for: path={weight.asked!r}")
    reasons = _reasons(weight, given, TABLE[: TABLE.index(row)])
    return Path(
        row.path, row.how, "; ".join(reasons) or "the first row of the table that is about such a weight"
    )


def check_asked(method: str, params: object) -> None:
    """Refuse parameters that name a path which no row has for such a method, on any device.

    Raises:
        ConfigError: says which paths there are.
    """
    asked = getattr(params, "path", "auto")
    there = [row for row in TABLE if row.concerns(method, params)]
    if asked == "auto" or any(row.path == asked for row in there):
        return
    named = [row.what for row in TABLE if row.path == asked and (method in row.methods or not row.methods)]
    rows = "; ".join(dict.fromkeys(named))
    raise ConfigError(
        "No device has such a path for a method with these parameters.",
        where=f"method {method!r}: path",
        found=f"path={asked!r}, activations={getattr(params, 'activations', 'none')!r}",
        need=f"{' or '.join(sorted({row.path for row in there}))}, or parameters that {asked!r} is for: {rows}",
        remedy="leave `path` at 'auto', or set `activations` and the scales of the weight to what the path takes",
    )


def _may(row: Row, weight: Weight) -> bool:
    """Whether the row is about such a weight, and may be taken unless it lacks something."""
    asked = weight.asked
    return row.concerns(weight.method, weight.params) and (
        row.default if asked == "auto" else row.path == asked
    )


def _reasons(weight: Weight, given: Input, rows: tuple[Row, ...]) -> list[str]:
    """Why each of the rows was not taken, if it is about such a weight."""
    found = []
    for row in rows:
        if not row.concerns(weight.method, weight.params):
            continue
        if weight.asked not in ("auto", row.path):
            continue
        lack = row.lacks(weight, given)
        if lack is not None:
            found.append(f"{row.path} {lack}")
        elif not row.default:
            found.append(f"{row.path} is there by name alone: path={row.path!r}")
    return found


def _no_path(weight: Weight, given: Input) -> ConfigError:
    asked = "" if weight.asked == "auto" else f" {weight.asked!r}"
    remedy = "leave `path` at 'auto', or meet one of the needs; olq.forward.table() prints them all"
    if given.gradient:
        remedy = (
            "take path='auto' and activations='none', whose reference has a gradient, "
            "or call it without: under torch.no_grad(), and with no tangents"
        )
    return ConfigError(
        f"The path{asked} can't compute this call." if asked else "No path computes this call.",
        where=weight.label,
        found=f"x of {given.tokens} rows in {given.dtype} on {given.device}",
        need="; ".join(dict.fromkeys(_reasons(weight, given, TABLE))),
        remedy=remedy,
    )


def _shapes(weight: Weight, x: Tensor) -> LayoutError:
    if weight.lead:
        return LayoutError(
            "A weight with leading dimensions is several matrices, and apply multiplies by one.",
            where=weight.label,
            found=f"leading dimensions {list(weight.lead)}",
            need="a weight [N, K]",
            remedy="decode the experts with olq.dequantize, or read the kernel tensors in a kernel of yours",
        )
    return LayoutError(
        "The input has not as many columns as the weight.",
        where=weight.label,
        found=f"x of shape {list(x.shape)}",
        need=f"[..., {weight.columns}]",
        remedy="pass the activations of this layer, features last",
    )


def not_quantized(layer: nn.Module) -> LayoutError:
    """What is said of a layer that no method stores."""
    return LayoutError(
        "This layer has no method, so no path was chosen for it.",
        where=type(layer).__name__,
        found="no attribute `quant_method`",
        need="a layer that olq.prepare took over, or whose create_weights was called",
        remedy="print the report that olq.load returned: it lists the layers that are quantized",
    )
