"""A device that is late, for tests of staging: two streams whose work runs when it must, or at random before.

Work is done on raw addresses when it runs, not when it is enqueued. Memory of a tensor that nobody holds any more is
handed out again at once. So a copy that comes before the former user of its memory is done, a tensor used before its
bytes are there, and a buffer read into while it is being copied from all give wrong bytes.
"""

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Event:
    """A point in a stream."""

    def __init__(self) -> None:
        self.passed = False

    def __call__(self) -> None:
        self.passed = True


class LateDevice:
    """A carrier to such a device.

    Args:
        seed: of the order in which the two streams run.
        eager: a tensor that is received has its bytes, so that code for a CPU can use it.
        pace: at most so many pieces of work are done at each call; 0 does nothing before it must.
    """

    def __init__(self, seed: int = 0, *, eager: bool = False, pace: int = 2) -> None:
        self._random, self._eager, self._pace = random.Random(seed), eager, pace
        self._lock = threading.RLock()
        self._consumer: deque[Callable[[], None] | Event | tuple[Event]] = deque()
        self._side: deque[Callable[[], None] | Event | tuple[Event]] = deque()
        self._free: list[bytearray] = []
        self.buffers: list[Tensor] = []
        #: Bytes on the device that somebody holds, and the most there ever were.
        self.held = self.peak = 0
        self.threads: set[str] = set()
        self.attached_now = 0

    def begin(self) -> None:
        """See `Carrier`."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """See `Carrier`."""
        with self._lock:
            self.attached_now += 1
            self.threads.add(threading.current_thread().name)
        try:
            yield
        finally:
            with self._lock:
                self.attached_now -= 1

    def host_buffer(self, size: int) -> Tensor:
        """See `Carrier`. Never freed here, since copies that run later read raw addresses."""
        self.buffers.append(torch.full((size,), 0xAA, dtype=torch.uint8))
        return self.buffers[-1]

    def allocate(self, size: int) -> Tensor:
        """See `Carrier`."""
        with self._lock:
            memory = self.memory(size)
            used = Event()
            self._consumer.append(used)
            self._side.append((used,))
            self._progress()
            return memory

    def memory(self, size: int) -> Tensor:
        """Memory for the consumer's stream, with what its last user left in it."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            fitting = [block for block in self._free if len(block) >= size]
            block = min(fitting, key=len) if fitting else bytearray(b"\xbb") * size
            self._free = [one for one in self._free if one is not block]
            lease = type("Lease", (ctypes.c_ubyte * size,), {}).from_buffer(block)
            weakref.finalize(lease, self._give_back, block, size)
            self.held += size
            self.peak = max(self.peak, self.held)
            return torch.frombuffer(lease, dtype=torch.uint8)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """See `Carrier`."""
        facts = into.data_ptr(), source.data_ptr(), source.numel()
        with self._lock:
            self._side.append(lambda: ctypes.memmove(*facts))
            self._progress()

    def mark(self) -> Event:
        """See `Carrier`."""
        with self._lock:
            self._side.append(event := Event())
            self._progress()
            return event

    def finish(self, mark: Event) -> None:
        """See `Carrier`."""
        with self._lock:
            while not mark.passed:
                if not self._step():
                    raise AssertionError("the streams wait for each other")

    def receive(self, tensor: Tensor, mark: Event) -> None:
        """See `Carrier`."""
        with self._lock:
            self._consumer.append((mark,))
            self._progress()
        if self._eager:
            self.finish(mark)

    def abandon(self, tensors: Iterable[Tensor]) -> None:
        """See `Carrier`."""
        kept = list(tensors)
        with self._lock:
            self._side.append(lambda: kept.clear())

    def use(self, tensor: Tensor, into: bytearray) -> None:
        """Enqueue a read of a tensor's bytes on the consumer's stream."""
        address, size = tensor.data_ptr(), tensor.nbytes
        with self._lock:
            self._consumer.append(lambda: into.extend(ctypes.string_at(address, size)))
            self._progress()

    def fill(self, tensor: Tensor, value: int) -> None:
        """Enqueue a write of a tensor's bytes on the consumer's stream."""
        address, size = tensor.data_ptr(), tensor.nbytes
        with self._lock:
            self._consumer.append(lambda: ctypes.memset(address, value, size))

    def drain(self) -> None:
        """Do all work."""
        with self._lock:
            while self._consumer or self._side:
                if not self._step():
                    raise AssertionError("the streams wait for each other")

    def _progress(self) -> None:
        for _ in range(self._random.randint(0, self._pace)):
            self._step()

    def _step(self) -> bool:
        """Do one piece of work of either stream; False if neither can go on."""
        for queue in self._random.sample((self._consumer, self._side), 2):
            if queue:
                work = queue[0]
                if isinstance(work, tuple):
                    if not work[0].passed:
                        continue
                    queue.popleft()
                    return True
                queue.popleft()()
                return True
        return False

    def _give_back(self, block: bytearray, size: int) -> None:
        with self._lock:
            self.held -= size
            self._free.append(block)
