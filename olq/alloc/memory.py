"""The one place that makes kernel-owned memory.

Made with `empty`, never with zeros: a producer overwrites every logical byte anyway. Padding that the spec's
order owns is written here, once, and by nobody else; see docs/memory.md for the rule.

Tensors are plain: no grad, no inference tensor, no base that they view. The address is aligned for real:
where the device's allocator gives less, some bytes more are taken.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from olq.alloc.spec import TensorSpec
from olq.errors import LayoutError

#: Called with each new tensor before its padding is written; set by olq.alloc.auditing, else None.
on_allocate: Callable[[Tensor, TensorSpec, str], None] | None = None


def allocate(spec: TensorSpec, *, device: torch.device | str, owner: str) -> Tensor:
    """Make one kernel-owned tensor; only its padding is written.

    Args:
        spec: what it has to be. Bytes that its order calls padding are written here.
        device: where; on "meta" there is no memory and nothing is written.
        owner: who has to write the rest, for messages: a layer's or an operator's name.

    Returns:
        A tensor of `spec.shape`, `spec.strides` and `spec.dtype`, uninitialised, without grad, not an
        inference tensor, its address a multiple of `spec.alignment`. No scratch.
    """
    with torch.inference_mode(False), torch.no_grad():
        flat = _empty(spec, torch.device(device))
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
    fills = spec.order.fills() if spec.order is not None and not flat.is_meta else ()
    if fills:
        boxes = storage_boxes(flat, spec)
        for fill in fills:
            boxes[(slice(None), *(slice(start, stop) for start, stop in fill.box))] = fill.value


def storage_boxes(flat: Tensor, spec: TensorSpec) -> Tensor:
    """Storage elements as [matrices, *order.storage_shape], in the order's units (bytes or elements); a view.

    Args:
        flat: what `storage_elements` returns.
        spec: with an order.

    Raises:
        LayoutError: the spec has no order, or one whose units are smaller than a byte.
    """
    if spec.order is None or spec.order.unit_bits == 4:
        raise LayoutError(
            "The storage of this tensor has no boxes of whole bytes.",
            where=f"TensorSpec, layout {spec.layout!r}",
            found="no order" if spec.order is None else "an order in nibbles",
            need="a spec made with TensorSpec.of, and an order in bytes or elements",
            remedy="write padding through the tensor itself",
        )
    units = flat.view(torch.uint8) if spec.order.unit_bits == 8 else flat
    return units.view(prod(spec.shape[:-2]), *spec.order.storage_shape)


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


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """The whole storage, flat, at an aligned address."""
    flat = torch.empty(spec.extent, dtype=spec.dtype, device=device)
    if _skip(flat, spec) == 0:
        return flat
    slack = spec.alignment // spec.dtype.itemsize - 1
    flat = torch.empty(spec.extent + slack, dtype=spec.dtype, device=device)
    return flat[_skip(flat, spec) :][: spec.extent]


def _skip(flat: Tensor, spec: TensorSpec) -> int:
    """Elements up to the next aligned address."""
    # There is no address on meta, and none while torch.compile traces: that memory is the compiler's.
    if torch.compiler.is_compiling() or _is_fake(flat):
        return 0
    return -flat.data_ptr() % spec.alignment // spec.dtype.itemsize


def _is_fake(flat: Tensor) -> bool:
    return flat.is_meta or type(flat) is not Tensor
