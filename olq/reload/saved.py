"""Kernel tensors and tags of a saved quantized model, taken as they are."""

import torch
from torch import Tensor, nn

from olq.errors import LayoutError
from olq.methods.state import FORMAT_SUFFIX, state_of
from olq.patterns import join
from olq.reload.checks import contradiction, same_bytes
from olq.reload.online import LayerLoad
from olq.reload.region import whole


def check_tag(layer: nn.Module, name: str, tag: Tensor, label: str) -> None:
    """Raise `LayoutError` unless a saved tag is that of the layer's weight.

    Args:
        layer: the layer.
        name: name of the tag's buffer.
        tag: its bytes.
        label: full name, for messages.
    """
    need = state_of(layer).plans[name.removesuffix(FORMAT_SUFFIX)].tag
    found = bytes(tag.to("cpu", torch.uint8).flatten().tolist()).decode(errors="replace")
    if found != need:
        raise _restore_error(label, found, need)


def restore(load: LayerLoad, name: str, tensor: Tensor, label: str) -> None:
    """Take a kernel tensor, or the tag, of a saved model.

    Args:
        load: the layer's load.
        name: name of the kernel tensor, or of the tag.
        tensor: its bytes.
        label: full name, for messages.

    Raises:
        LayoutError: shape, dtype or meaning differ from what this layer stores.
        CoverageError: other bytes have arrived for it, under another name of a shared module.
    """
    for weight_name, weight in load.weights.items():
        if name == weight_name + FORMAT_SUFFIX:
            check_tag(load.layer, name, tensor, label)
            load.restored.add(name)
            return
        for suffix, spec in weight.plan.tensors.items():
            if name == weight_name + suffix:
                if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                    raise _restore_error(
                        label, f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
                    )
                if name in load.restored:
                    if not same_bytes(weight.tensors[suffix], tensor):
                        raise contradiction(weight.label + suffix, label)
                    return
                weight.prepare_tensors()
                weight.tensors[suffix].copy_(tensor)
                load.restored.add(name)
                return


def finish_restored(load: LayerLoad, label: str) -> str | None:
    """Mark weights whose kernel tensors all arrived as complete.

    Returns:
        What is missing, in words, or None.
    """
    if not load.restored:
        return None
    for name, weight in load.weights.items():
        names = [name + suffix for suffix in (*weight.plan.tensors, FORMAT_SUFFIX)]
        there = [n for n in names if n in load.restored]
        if there and len(there) < len(names):
            missing = ", ".join(join(label, n) for n in names if n not in load.restored)
            return f"{missing} (the other tensors of this saved weight are there)"
        if there and name not in load.whole:
            weight.check_new(whole(weight.parameter.shape), "a saved quantized weight")
            weight.coverage.add(whole(weight.parameter.shape), "saved")
            load.whole.add(name)
    return None


def _restore_error(label: str, found: str, need: str) -> LayoutError:
    return LayoutError(
        "A saved quantized tensor does not fit this layer.",
        where=label,
        found=found,
        need=need,
        remedy="prepare the model with the configuration that it was saved with, or load the full-precision checkpoint",
    )
