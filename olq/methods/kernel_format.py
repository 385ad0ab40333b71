"""Where a weight's parts sit in the kernel format, and who writes what lies between them.

Rows are padded at the end to `ROW_ALIGNMENT`. Where a scale covers several rows (128x128 blocks), each part but the
last is padded too, so that the next one starts on the grid. Columns are padded to what the method asks for.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from olq.alloc import TensorSpec
from olq.methods.base import Target, WeightPlan

#: Rows of a kernel format are a multiple of this: matrix kernels want 16-byte rows in both operands.
ROW_ALIGNMENT = 16


def round_up(value: int, multiple: int) -> int:
    """Least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def place_parts(parts: Sequence[int], grid_rows: int) -> tuple[tuple[int, ...], int]:
    """First kernel row of each part, and the number of kernel rows.

    Args:
        parts: logical rows of each part.
        grid_rows: every part starts on a multiple of this.
    """
    starts, end = [], 0
    for rows in parts:
        start = round_up(end, grid_rows)
        starts.append(start)
        end = start + rows
    return tuple(starts), round_up(end, ROW_ALIGNMENT)


def gaps(parts: Sequence[int], starts: Sequence[int], total: int) -> Iterator[slice]:
    """Kernel rows that belong to no part."""
    ends = [start + rows for start, rows in zip(starts, parts, strict=True)]
    for end, start in zip([0, *ends], [*starts, total], strict=True):
        if end < start:
            yield slice(end, start)


def code_spec(lead: Sequence[int], rows: int, columns: int, padding: str) -> TensorSpec:
    """Spec of a code tensor, uint8 [*lead, rows, columns]."""
    return TensorSpec((*lead, rows, columns), torch.uint8, padding=padding)


def pad_matrix_(
    tensor: Tensor, parts: Sequence[int], starts: Sequence[int], columns: int, value: float
) -> None:
    """Write `value` to the rows of [*lead, R, C] that belong to no part and to the columns from `columns` on."""
    for rows in gaps(parts, starts, tensor.shape[-2]):
        tensor[..., rows, :] = value
    if columns < tensor.shape[-1]:
        tensor[..., columns:] = value


def shifted(rows: range, start: int) -> slice:
    """The rows of a part as a slice of the kernel format."""
    return slice(rows.start + start, rows.stop + start, rows.step)


def codes_of(
    tensors: Mapping[str, Tensor], plan: WeightPlan, target: Target, *, codes_a_byte: int = 1
) -> Tensor:
    """The code bytes of `target`, a view [*lead, n, ceil(k / codes a byte)]; it starts on a whole byte."""
    rows = shifted(target.rows, plan.kernel_starts[target.part])
    columns = slice(target.columns.start // codes_a_byte, -(-target.columns.stop // codes_a_byte))
    return tensors[""][target.lead][..., rows, columns]


def numbers(scales: Sequence[Tensor]) -> Tensor:
    """Whether each float32 tensor is free of NaN, bool [len(scales)]; a few launches for all of them on a GPU."""
    # Sums of magnitudes: they may overflow to infinity, but only a NaN makes a NaN.
    return ~torch.stack(torch.ops.aten._foreach_norm.Scalar(list(scales), 1)).isnan()
