"""Compile and launch what `plans` decided; launch it again with as little Python as Triton allows.

A launch through Triton's own front costs tens of microseconds of Python, more than some kernels run. What a launch
needs follows from the arguments' dtypes, shapes, strides, devices and alignment: it is kept under that signature,
and a later call of the same signature hands its addresses to the compiled kernel. The operator's checks look at
nothing else, so they need not be repeated either. Operators that return new tensors have these made on the way: they
come first among a plan's tensors, and the signature is that of the rest.
"""

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from olq.alloc.again import Form, is_audited
from olq.kernels import plans
from olq.kernels.shapes import Launch, Plan

_KNOWN_TRITON = ("3.6.",)
"""Releases whose compiled kernels can be called as `_again` does; others go through Triton's front each time."""

_LIMIT = 4096
_READY: dict[tuple[object, ...], tuple[int, int, tuple["_Ready", ...]]] = {}
"""Signature to device, float32 of scratch, launches."""

_NEW: dict[tuple[object, ...], tuple[torch.device, int, tuple["_Ready", ...], tuple[Form, ...]]] = {}
"""The same for operators that return new tensors, and what these are."""


_allowed = True
"""Whether launches are made whose programs wait for each other; a part of each signature."""


class _Ready:
    """One launch, all but its addresses.

    Args:
        kernel: as Triton compiled it.
        launch: what was launched.
    """

    __slots__ = ("before", "operands", "run", "tail")

    def __init__(self, kernel: Any, launch: Launch) -> None:
        launcher = kernel.run
        self.run, self.operands = launcher.launch, launch.operands
        # Grid; then what follows the stream: the function, flags, two scratch buffers of Triton's own, which these
        # kernels don't need, sizes, and hooks of profilers.
        flags = launcher.launch_cooperative_grid, launcher.launch_pdl
        self.before = (
            launch.grid,
            (kernel.function, *flags, None, None, kernel.packed_metadata, None, None, None),
        )
        # What a kernel is compiled for goes by unread, and so does the table that a single launch has not.
        unread = len(_kernel(launch.kernel).arg_names) - len(launch.operands) - len(launch.numbers)
        self.tail = (*launch.numbers, *[None] * unread)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(args: Sequence[object]) -> str | None:
    """Why no kernel can run for these tensors, whatever their shapes; None if one can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    devices = {a.device for a in args if isinstance(a, Tensor)}
    if len(devices) > 1:
        return f"the tensors are on {' and '.join(sorted(map(str, devices)))}"
    device = devices.pop()
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the GPU's compute capability is below 8.0"
        return None
    return None if device.type == "cpu" and interpreted() else f"the tensors are on {device}"


def replay(operator: str, args: Sequence[object]) -> bool:
    """Launch again what `launch` launched for arguments of the same signature; False if it never did."""
    key, pointers = _signature(operator, args, _allowed)
    ready = _READY.get(key)
    if ready is None:
        return False
    device, scratch, launches = ready
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _again(launches, scratch, pointers, device)
    else:
        _again(launches, scratch, pointers, device)
    return True


def renew(operator: str, args: Sequence[object]) -> tuple[Tensor, ...] | None:
    """Make outputs and launch into them, as `launch` did for arguments of the same signature; None if it never did.

    Also None where an audit wants to see what is made, or memory is aligned to less than kernels were compiled for.
    """
    key, pointers = _signature(operator, args, _allowed)
    ready = _NEW.get(key)
    if ready is None or is_audited():
        return None
    device, scratch, launches, forms = ready
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            outputs = tuple(form.make(device) for form in forms)
    else:
        outputs = tuple(form.make(device) for form in forms)
    made = [output.data_ptr() for output in outputs]
    if any(pointer & 15 for pointer in made):
        return None
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _again(launches, scratch, made + pointers, device.index)
    else:
        _again(launches, scratch, made + pointers, device.index)
    return outputs


def launch(operator: str, args: Sequence[object], outputs: tuple[Tensor, ...] = ()) -> bool:
    """Compile if need be, and launch on the current stream; False if there is no kernel for these arguments.

    Args:
        operator: its name.
        args: its arguments.
        outputs: what it returns, from olq.alloc; first among the plan's tensors.
    """
    every = (*outputs, *args)
    if unavailable(every):
        return False
    plan = plans.plan(operator, every)
    if isinstance(plan, str):
        return False
    first = next(a for a in every if isinstance(a, Tensor))
    allowed = _allowed  # once, for the plan and for what is kept: another thread may forbid it meanwhile
    plan = suited(plan, first.device, allowed)
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            _first(operator, plan, args, outputs, first.device, allowed)
    else:
        _first(operator, plan, args, outputs, first.device, allowed)
    return True


def suited(plan: Plan, device: torch.device, allowed: bool) -> Plan:
    """What a device launches: `plan.together` if it is allowed and the device can run its programs together."""
    faster = plan.together if allowed else None
    if faster is None or any(
        math.prod(one.grid) > _together(device) for one in faster.launches if one.together
    ):
        return plan
    return faster


def allow_together(allowed: bool) -> None:
    """Allow, as at the start, or forbid launches whose programs all run at once and wait for each other.

    Such a launch starts only when every multiprocessor that it needs is free, on an H200 all of them. If a kernel on
    another stream holds one until this stream makes progress (it waits for what is sent after the launch), both wait
    forever: forbid it before such kernels run, or where a stream has only a part of the GPU (green contexts, not
    tried). Bytes stay the same.

    Args:
        allowed: for calls from now on, of the whole process. CUDA graphs keep what they captured.
    """
    global _allowed
    _allowed = allowed


def launch_once(one: Launch, tensors: Sequence[Tensor]) -> None:
    """Launch through Triton's front: for kernels that are rare, or whose numbers differ each time."""
    device = tensors[0].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            _compiled(one, tensors, device)
    else:
        _compiled(one, tensors, device)


def _signature(operator: str, args: Sequence[object], allowed: bool) -> tuple[tuple[object, ...], list[int]]:
    """All that a plan and its compiled kernels depend on; and the tensors' addresses."""
    key: list[object] = [operator, allowed]
    pointers = []
    for a in args:
        if isinstance(a, Tensor):
            pointer = a.data_ptr()
            pointers.append(pointer)
            key += (a.get_device(), a.dtype, a.shape, a.stride(), pointer & 15)
        else:
            key.append(tuple(a) if isinstance(a, list) else a)
    return tuple(key), pointers


def _again(launches: tuple[_Ready, ...], scratch: int, pointers: list[int], device: int) -> None:
    if scratch:
        partial = torch.empty(scratch, dtype=torch.float32, device=device)
        pointers.append(partial.data_ptr())
    stream = _stream_of()(device)
    for one in launches:
        grid, function = one.before
        one.run(*grid, stream, *function, *[pointers[i] for i in one.operands], *one.tail)


def _first(
    operator: str,
    plan: Plan,
    args: Sequence[object],
    outputs: tuple[Tensor, ...],
    device: torch.device,
    allowed: bool,
) -> None:
    tensors = [a for a in (*outputs, *args) if isinstance(a, Tensor)]
    if plan.scratch:
        tensors.append(torch.empty(plan.scratch, dtype=torch.float32, device=device))
    ready = [(_compiled(one, tensors, device), one) for one in plan.launches]
    if device.type == "cuda" and _known():
        if len(_READY) + len(_NEW) >= _LIMIT:
            _READY.clear()
            _NEW.clear()
        key, _ = _signature(operator, args, allowed)
        launches = tuple(_Ready(kernel, one) for kernel, one in ready)
        if outputs:
            _NEW[key] = device, plan.scratch, launches, tuple(map(Form, outputs))
        else:
            _READY[key] = device.index, plan.scratch, launches


def _compiled(one: Launch, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Launch, and return what Triton compiled."""
    operands = (tensors[i].detach() for i in one.operands)
    return _kernel(one.kernel)[one.grid](*operands, *one.numbers, **settings(one, device))


def settings(one: Launch, device: torch.device) -> dict[str, object]:
    """What a launch on this device is compiled for, by name: constants, and options of the compiler."""
    found = {
        **one.constants,
        "HARDWARE": _hardware(device),
        "num_warps": one.warps,
        "enable_fp_fusion": False,
    }
    if "EARLY" in _kernel(one.kernel).arg_names:
        found["EARLY"] = _early(device)
        if one.waits and _early(device):
            found["launch_pdl"] = True
    if one.together and device.type == "cuda":
        found["launch_cooperative_grid"] = True
    # Only CUDA's compiler is told a number of registers.
    unknown = () if torch.version.cuda is not None else ("maxnreg",)
    return found | {name: value for name, value in one.options.items() if name not in unknown}


@functools.cache
def _kernel(name: str) -> Any:
    module, function = name.split(".")
    return getattr(importlib.import_module(f"olq.kernels.{module}"), function)


@functools.cache
def _hardware(device: torch.device) -> bool:
    """Whether `rounding` may use the GPU's own conversions."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


@functools.cache
def _early(device: torch.device) -> bool:
    """Whether a kernel may be started before the one in front of it on its stream is done, and wait by itself."""
    return _hardware(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _together(device: torch.device) -> int:
    """Programs that may wait for each other: one a multiprocessor; in the interpreter one, which runs them in turn."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count if _early(device) else 0


@functools.cache
def _known() -> bool:
    return importlib.import_module("triton").__version__.startswith(_KNOWN_TRITON)


def current_stream(device: torch.device) -> int:
    """The handle of a CUDA device's current stream, at a tenth of what `torch.cuda.current_stream` takes."""
    return _handle_of()(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _handle_of() -> Callable[[int], int]:
    if importlib.util.find_spec("triton") is None:
        return lambda index: torch.cuda.current_stream(index).cuda_stream
    return _stream_of()


@functools.cache
def _stream_of() -> Callable[[int], int]:
    return importlib.import_module("triton.runtime.driver").driver.active.get_current_stream
