"""What may become a parameter's values, and what to say about the rest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from olq.errors import CoverageError, SourceError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Dtypes of quantized weights, which mean nothing without their scales.
CODES = (
    torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
)  # fmt: skip


def check_source(source: Tensor, label: str, name: str) -> None:
    """Raise `SourceError` unless `source` is a plain float tensor with memory."""
    if source.dtype not in FLOATS or source.device.type == "meta":
        raise _source_error(source, label, name, FLOATS)


def check_values(source: Tensor, parameter: Tensor, label: str, name: str) -> None:
    """Raise `SourceError` if a float parameter would take codes of a quantized tensor for values."""
    if source.dtype in CODES and parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1:
        raise _source_error(source, label, name, FLOATS)


def check_shape(source: Tensor, parameter: Tensor, label: str, name: str) -> None:
    """Raise `SourceError` unless `source` has the parameter's shape, or both have one element."""
    if source.shape != parameter.shape and not source.numel() == parameter.numel() == 1:
        raise SourceError(
            "A tensor does not have its parameter's shape.",
            where=f"{label}, from {name!r}",
            found=f"shape {list(source.shape)}, {source.dtype}",
            need=f"shape {list(parameter.shape)}",
            remedy="check that checkpoint and model agree; slice fused or sharded tensors before feeding them",
        )


def _source_error(source: Tensor, label: str, name: str, need: Sequence[torch.dtype]) -> SourceError:
    if source.device.type == "meta":
        found, remedy = "a tensor on the meta device: it has no values", "feed tensors that are in memory"
    elif source.dtype in CODES:
        found = f"{source.dtype}, which looks already quantized or packed"
        remedy = "feed the full-precision weight; quantized tensors load by their own names, scales included"
    else:
        found, remedy = f"{source.dtype}, which is no weight", "feed the full-precision weight"
    return SourceError(
        "This tensor can't be the source of a full-precision weight.",
        where=f"{label}, from {name!r}",
        found=found,
        need=f"one of {', '.join(str(d) for d in need)}, with values",
        remedy=remedy,
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality of bytes of tensors of one dtype: -0.0 is not 0.0, and NaN equals itself."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(as_integers), b.to(a.device).view(as_integers))


def contradiction(first: str, second: str) -> CoverageError:
    """What to raise when a tied parameter has different values under two names."""
    return CoverageError(
        "A tied parameter arrived under two names with different values.",
        where=f"{second} (tied to {first})",
        found="values that differ from those that arrived first",
        need="equal values, or a model whose parameters are not tied",
        remedy="untie the parameters before prepare(), or drop one of the names from the source",
    )


def first_non_finite(source: Tensor) -> tuple[list[int], float]:
    """Index and value of the first element that is inf or NaN; looked for row by row, without a large mask."""
    for i, row in enumerate(source.reshape(-1, source.shape[-1])):
        bad = (~row.isfinite()).nonzero()
        if len(bad):
            index = torch.unravel_index(torch.tensor(i, device="cpu"), source.shape[:-1])
            return [*(int(d) for d in index), int(bad[0])], float(row[bad[0]])
    return [0] * source.dim(), float("nan")
