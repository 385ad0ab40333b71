"""How an operator is declared, and the checks that operators share. No arithmetic.

A check raises LayoutError for arguments that don't fit; it only looks at shapes, dtypes, strides and devices, so
that it is the fake implementation too. Sizes may be symbolic; a comparison then becomes a guard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from olq import kernels
from olq.errors import LayoutError
from olq.formats import SCALE_LAYOUTS
from olq.numerics.source import SOURCE_DTYPES

_Check = Callable[..., None]
_Function = Callable[..., object]
_LIBRARY = torch.library.Library("olq", "DEF")
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Parts of schemas.
BLOCK = "int block_rows, int block_columns"
PLACE = "str scale_layout, int row, int row_step, int column"
TAIL = "ScalarType? through=None, bool saturate=False"


def operator(
    arguments: str,
    check: _Check,
    *,
    fake: _Function | None = None,
    returns: str = "(Tensor, Tensor)",
    make: Callable[..., tuple[Tensor, ...]] | None = None,
    kernel: bool = False,
) -> Callable[[_Function], _Function]:
    """Declare `olq::<function name>`: the function on CPU and CUDA, behind `check`.

    Args:
        arguments: of the schema.
        check: takes the operator's arguments and raises. Sizes may be symbolic; a comparison then becomes a
            guard.
        fake: None for an operator that writes into its arguments, which for tensors without memory does
            nothing; or the function that makes such tensors as the operator returns.
        returns: of the schema, with `fake`: (codes, scale), or one tensor.
        make: with `fake`: takes the operator's arguments and makes what it returns, kernel tensors in olq.alloc. The
            decorated function takes that before the arguments, and writes it.
        kernel: olq.kernels may have a kernel for it. On CUDA tensors the function is then only for the calls that
            `olq.kernels.path` says it is for. A kernel also writes the padding of what `make` made.

    Returns:
        What the operator does, unchecked: the function, or with `make` one that takes the operator's arguments alone.
    """

    def declare(writes: _Function) -> _Function:
        name = writes.__name__
        function = _making(make, writes) if make else writes

        def checked_on(device: str) -> _Function:
            def checked(*args: object, **kwargs: object) -> object:
                check(*args, **kwargs)
                return _as_it_is(device, function, args, kwargs)

            return checked

        def by_kernel(*args: object, **kwargs: object) -> object:
            # What was launched before needs no check: checks look at nothing that a replay's signature leaves out.
            if kwargs or not kernels.replay(name, args):
                check(*args, **kwargs)
                if kwargs or not kernels.launch(name, args):
                    return _as_it_is("cuda", function, args, kwargs)
            return None

        def new_by_kernel(*args: object, **kwargs: object) -> object:
            outputs = None if kwargs else kernels.renew(name, args)
            if outputs is None and make is not None:
                check(*args, **kwargs)
                with torch.no_grad():
                    outputs = make(*args, **kwargs)
                if kwargs or not kernels.launch(name, args, outputs):
                    _as_it_is("cuda", writes, (*outputs, *args), kwargs)
            return _returned(outputs)

        def checked_fake(*args: object, **kwargs: object) -> object:
            check(*args, **kwargs)
            return fake(*args, **kwargs) if fake else None

        _LIBRARY.define(
            f"{name}({arguments}) -> {returns if fake else '()'}", tags=(torch.Tag.pt2_compliant_tag,)
        )
        _LIBRARY.impl(name, checked_on("cpu"), "CPU")
        on_cuda = (new_by_kernel if make else by_kernel) if kernel else checked_on("cuda")
        _LIBRARY.impl(name, on_cuda, "CUDA")
        torch.library.register_fake(f"olq::{name}", checked_fake, lib=_LIBRARY)
        return function

    return declare


def _as_it_is(
    device: str, function: _Function, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Call without gradients, and outside of torch.autocast, which would compute in another precision."""
    with torch.no_grad():
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)


def _making(make: Callable[..., tuple[Tensor, ...]], writes: _Function) -> _Function:
    """The function that makes and writes, under the name and the words of the one that writes."""

    def function(*args: object, **kwargs: object) -> object:
        outputs = make(*args, **kwargs)
        writes(*outputs, *args, **kwargs)
        return _returned(outputs)

    function.__name__, function.__doc__ = writes.__name__, writes.__doc__
    return function


def _returned(outputs: tuple[Tensor, ...] | None) -> object:
    return outputs[0] if outputs is not None and len(outputs) == 1 else outputs


def fail(operator: str, argument: str, found: object, need: str) -> None:
    """Refuse an argument."""
    raise LayoutError(
        f"{operator} can't take this {argument}.",
        where=f"torch.ops.olq.{operator}, argument {argument!r}",
        found=str(found),
        need=need,
        remedy="make the storage with olq.alloc from the method's plan, or pass the matching view of it",
    )


def check_shape(operator: str, argument: str, tensor: Tensor, need: tuple[int, ...]) -> None:
    """Refuse any other shape."""
    if tuple(tensor.shape) != tuple(need):
        fail(operator, argument, f"shape {tuple(tensor.shape)}", f"shape {tuple(need)}")


def check_dtype(operator: str, argument: str, tensor: Tensor, *need: torch.dtype) -> None:
    """Refuse any other dtype."""
    if tensor.dtype not in need:
        fail(operator, argument, tensor.dtype, f"{' or '.join(str(dtype) for dtype in need)}")


def check_source(
    operator: str, source: Tensor, through: torch.dtype | None
) -> tuple[tuple[int, ...], int, int]:
    """Check a source; its (lead, n, k)."""
    check_dtype(operator, "source", source, *SOURCE_DTYPES)
    if through is not None and through not in SOURCE_DTYPES:
        fail(operator, "through", through, f"None or {' or '.join(str(dtype) for dtype in SOURCE_DTYPES)}")
    return check_matrix(operator, "source", source)


def check_matrix(operator: str, argument: str, tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Check that a tensor has rows and columns; its (lead, n, k)."""
    if tensor.dim() < 2:
        fail(operator, argument, f"{tensor.dim()} dimensions", "[*lead, n, k]")
    *lead, n, k = tensor.shape
    return tuple(lead), n, k


def check_blocks(operator: str, block_rows: int, block_columns: int) -> tuple[int, int]:
    """Check a block size; 0 is the whole extent."""
    if block_rows < 0 or block_columns < 0:
        fail(operator, "block", (block_rows, block_columns), "positive, or 0 for the whole extent")
    return block_rows, block_columns


def check_same_device(operator: str, **tensors: Tensor) -> None:
    """Check that all are where the first one is."""
    (first, anchor), *rest = tensors.items()
    for argument, tensor in rest:
        if tensor.device != anchor.device:
            fail(operator, argument, tensor.device, f"{anchor.device}, where {first!r} is")


def check_bias(operator: str, bias: Tensor | None, n: int, dtype: torch.dtype, **beside: Tensor) -> None:
    """Check that a bias, if there is one, has n elements of the dtype, where the tensor beside it is."""
    if bias is not None:
        check_dtype(operator, "bias", bias, dtype)
        check_shape(operator, "bias", bias, (n,))
        check_same_device(operator, **beside, bias=bias)


def check_places(
    operator: str,
    scale: Tensor,
    lead: tuple[int, ...],
    n: int,
    blocks: int,
    layout: str,
    place: tuple[int, int, int],
) -> None:
    """Check that n x blocks scale bytes fit where they are told to go."""
    row, row_step, column = place
    check_dtype(operator, "scale", scale, torch.uint8)
    if layout not in SCALE_LAYOUTS:
        fail(operator, "scale_layout", repr(layout), f"one of {', '.join(SCALE_LAYOUTS)}")
    if row < 0 or column < 0 or row_step < 1:
        found = f"row {row}, row_step {row_step}, column {column}"
        fail(operator, "place", found, "row >= 0, row_step >= 1, column >= 0")
    if scale.dim() != len(lead) + 2 or tuple(scale.shape[:-2]) != tuple(lead):
        fail(operator, "scale", f"shape {tuple(scale.shape)}", f"{(*lead, 'R', 'C')}")
    rows, columns = scale.shape[-2:]
    last_row, last_column = row + max(n - 1, 0) * row_step, column + blocks
    if n and blocks and (last_row >= rows or last_column > columns):
        need = f"at least {last_row + 1} rows and {last_column} columns"
        fail(operator, "scale", f"shape {tuple(scale.shape)}", need)
    if layout == "swizzled_128x4":
        dense = scale.stride(-1) == 1 and (scale.stride(-2) == columns or not columns)
        if rows % 128 or columns % 4 or not dense:
            found = f"shape {tuple(scale.shape)}, strides {tuple(scale.stride())}"
            fail(operator, "scale", found, "rows in 128s, columns in 4s, the last two dimensions dense")
