"""How staged bytes get to a device: its memory, its copies, and who waits for whom.

Reading threads copy on a stream of their own, beside the one on which the weights are quantized. Memory of tensors
comes from the pool of the quantizing stream, so that whoever frees one there may have it used again at once:

    a copy into new memory     waits, on the device, for what the quantizing stream had been given when it was allocated
    use of a finished tensor   waits, on the device, for the copy
    a buffer's next read       waits, in the reading thread, for the copies out of it
    a tensor that nobody took  its memory is not used again before the copies into it are over

No wait stops the thread that feeds the session.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from olq.errors import ConfigError


class Carrier(Protocol):
    """Takes bytes from buffers in the host's memory to tensors on a device."""

    def begin(self) -> None:
        """Called once, in the thread that will take the tensors, before any other method."""
        ...

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Around all that a reading thread does."""
        ...

    def host_buffer(self, size: int) -> Tensor:
        """Memory on the host to read into: uint8, [size]."""
        ...

    def allocate(self, size: int) -> Tensor:
        """Memory on the device: uint8, [size]. Copies into it, begun from now on, come after its former use."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Begin to copy bytes of a buffer to the device."""
        ...

    def mark(self) -> Any:
        """A point behind all copies that were begun so far, by any thread."""
        ...

    def finish(self, mark: Any) -> None:
        """Wait until the copies before a mark are over."""
        ...

    def receive(self, tensor: Tensor, mark: Any) -> None:
        """Called by the thread that takes a tensor: what it does with it from now on sees the bytes before the mark."""
        ...

    def abandon(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that nobody will take: copies into them may still run when they are dropped."""
        ...


class CudaCarrier:
    """A CUDA device, from page-locked memory, on a stream of its own.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """See `Carrier.begin`. Memory is made for the thread's current stream."""
        self._consumer = torch.cuda.current_stream(self.device)
        self._side = torch.cuda.Stream(self.device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """See `Carrier.attached`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            yield

    def host_buffer(self, size: int) -> Tensor:
        """See `Carrier.host_buffer`.

        Raises:
            ConfigError: the machine has not that much memory to lock.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise ConfigError(
                "There is no page-locked memory for a staging buffer.",
                where=f"a buffer of {size} bytes, one of two",
                found=str(error).splitlines()[0],
                need="memory that the driver can lock",
                remedy="pass a smaller staging=olq.Staging(buffer_bytes=...), or staging=None",
            ) from error

    def allocate(self, size: int) -> Tensor:
        """See `Carrier.allocate`."""
        with torch.cuda.stream(self._consumer):
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            used = self._consumer.record_event()
        self._side.wait_event(used)
        return memory

    def copy(self, into: Tensor, source: Tensor) -> None:
        """See `Carrier.copy`."""
        into.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """See `Carrier.mark`."""
        event = torch.cuda.Event(blocking=True)  # whoever waits for it leaves the core to those who read
        event.record(self._side)
        return event

    def finish(self, mark: torch.cuda.Event) -> None:
        """See `Carrier.finish`."""
        mark.synchronize()

    def receive(self, tensor: Tensor, mark: torch.cuda.Event) -> None:
        """See `Carrier.receive`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        if current != self._consumer:
            tensor.record_stream(current)

    def abandon(self, tensors: Iterable[Tensor]) -> None:
        """See `Carrier.abandon`."""
        for tensor in tensors:
            tensor.record_stream(self._side)


def carrier_for(devices: Iterable[torch.device], shadow: str | None) -> Carrier | None:
    """What takes the tensors of files to where a load writes, or None if that is not one CUDA device.

    Args:
        devices: where its parameters are.
        shadow: as in `LoadOptions`: with "host", quantized bytes are made in the host's memory.
    """
    if shadow == "host":
        return None
    devices = set(devices)
    if any(device.type != "cuda" for device in devices):
        return None
    places = {torch.cuda.current_device() if d.index is None else d.index for d in devices}
    return CudaCarrier(torch.device("cuda", places.pop())) if len(places) == 1 else None
