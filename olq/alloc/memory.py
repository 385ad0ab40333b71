"""The one place that makes kernel-owned memory.

Made with `empty`, never with zeros: a producer overwrites every logical byte anyway. Padding that the spec's
order owns is written here, once, and by nobody else; see docs/memory.md for the rule.

Tensors are plain: no grad, no inference tensor, no base that they view. The address is aligned for real:
where the device's allocator gives less, some bytes more are taken.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from olq.alloc.spec import TensorSpec
from olq.errors import LayoutError
from olq.layout import Order, contiguous_strides

#: Called with each new tensor before its padding is written; set by olq.alloc.auditing, else None.
on_allocate: Callable[[Tensor, TensorSpec, str], None] | None = None


def allocate(spec: TensorSpec, *, device: torch.device | str, owner: str, pinned: bool = False) -> Tensor:
    """Make one kernel-owned tensor; only its padding is written.

    Args:
        spec: what it has to be. Bytes that its order calls padding are written here.
        device: where; on "meta" there is no memory and nothing is written.
        owner: who has to write the rest, for messages: a layer's or an operator's name.
        pinned: page-locked memory of the host, which a GPU reads at the speed of its bus. `device` is the CPU then.

    Returns:
        A tensor of `spec.shape`, `spec.strides` and `spec.dtype`, uninitialised, without grad, not an
        inference tensor, its address a multiple of `spec.alignment`. No scratch.
    """
    with torch.inference_mode(False), torch.no_grad():
        flat = _empty(spec, torch.device(device), pinned)
        if on_allocate is not None and not torch.compiler.is_compiling() and not _is_fake(flat):
            on_allocate(flat, spec, owner)
        fill_padding_(flat, spec)
        if torch.compiler.is_compiling():  # which does not trace set_
            return flat.as_strided(spec.shape, spec.stride)
        # Not a view: pickling, parameters and safetensors treat the tensor as the owner of its storage.
        tensor = torch.empty(0, dtype=spec.dtype, device=flat.device)
        return tensor.set_(flat.untyped_storage(), flat.storage_offset(), spec.shape, spec.stride)


def write_padding_(tensor: Tensor, spec: TensorSpec) -> None:
    """Write the padding that `spec.order` owns: for tensors from elsewhere, or that something wrote over.

    Args:
        tensor: of the spec's shape, dtype and strides, with the spec's whole storage behind it.
        spec: with an order; without one nothing is written.

    Raises:
        LayoutError: the tensor is not what the spec says.
    """
    with torch.no_grad():
        fill_padding_(storage_elements(tensor, spec), spec)


def fill_padding_(flat: Tensor, spec: TensorSpec) -> None:
    """Write the padding that `spec.order` owns into storage elements, as `storage_elements` returns them."""
    order = spec.order
    if order is None or order.unit_bits == 4 or flat.is_meta or not spec.extent:
        return
    units = flat.view(torch.uint8) if order.unit_bits == 8 else flat
    matrices = prod(spec.shape[:-2])
    if torch.compiler.is_compiling():  # Dynamo knows neither caches nor strided views of another dtype
        whole = units.view(matrices, *order.storage_shape)
        for fill in order.fills():
            whole[(slice(None), *(slice(start, stop) for start, stop in fill.box))] = fill.value
        return
    for size, stride, start, value in _boxes(order, matrices):
        units.as_strided(size, stride, units.storage_offset() + start).fill_(value)


@lru_cache(maxsize=1024)
def _boxes(order: Order, matrices: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int, float], ...]:
    """The padding of `matrices` matrices as strided boxes of units: (size, stride, start, value)."""
    steps = (order.extent, *contiguous_strides(order.storage_shape))
    found = []
    for fill in order.fills():
        spans = ((0, matrices), *fill.box)
        dims = [(stop - start, step) for (start, stop), step in zip(spans, steps, strict=True)]
        kept = [(size, step) for size, step in dims if size != 1]
        first = sum(start * step for (start, _), step in zip(spans, steps, strict=True))
        found.append((tuple(size for size, _ in kept), tuple(step for _, step in kept), first, fill.value))
    return tuple(found)


def storage_elements(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """All elements of the tensor's storage in a row, gaps and padding included; a view."""
    found = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    there = tensor.untyped_storage().nbytes() // spec.dtype.itemsize - tensor.storage_offset()
    if found != (spec.shape, spec.stride, spec.dtype) or there < spec.extent:
        raise LayoutError(
            "A tensor is not what its spec says.",
            where=f"{spec.layout} tensor",
            found=f"{tensor.dtype}, shape {list(tensor.shape)}, strides {list(tensor.stride())}, "
            f"{there} elements of storage",
            need=f"{spec.dtype}, shape {list(spec.shape)}, strides {list(spec.stride)}, "
            f"{spec.extent} elements of storage",
            remedy="make it with olq.alloc.allocate; copies like .contiguous() lose strides and padding",
        )
    return tensor.as_strided((spec.extent,), (1,), tensor.storage_offset())


def _empty(spec: TensorSpec, device: torch.device, pinned: bool) -> Tensor:
    """The whole storage, flat, at an aligned address."""
    flat = torch.empty(spec.extent, dtype=spec.dtype, device=device, pin_memory=pinned)
    if _skip(flat, spec) == 0:
        return flat
    slack = spec.alignment // spec.dtype.itemsize - 1
    flat = torch.empty(spec.extent + slack, dtype=spec.dtype, device=device, pin_memory=pinned)
    return flat[_skip(flat, spec) :][: spec.extent]


def _skip(flat: Tensor, spec: TensorSpec) -> int:
    """Elements up to the next aligned address."""
    # There is no address on meta, and none while torch.compile traces: that memory is the compiler's.
    if torch.compiler.is_compiling() or _is_fake(flat):
        return 0
    return -flat.data_ptr() % spec.alignment // spec.dtype.itemsize


def _is_fake(flat: Tensor) -> bool:
    return flat.is_meta or type(flat) is not Tensor
