"""Safetensors files on their way to a device: read by threads, copied, and handed out, all at the same time.

    threads   read pieces of the files into slots of two buffers in the host's memory
    copies    begin as soon as a piece is there, each tensor into memory of its own
    items     hands tensors out in file order; a consumer that drops them gives their memory back

A tensor that was handed out is the consumer's, as from any other source: it stays what it is for as long as somebody
holds it.

    bound on the host     two buffers
    bound on the device   tensors that are on their way or have just been handed out: those of at most a buffer's size
                          count together, and are no more than two buffers; of larger ones there is one at a time
    order                 pieces are taken, and memory is made, in file order, so that what is needed first never waits
                          for what comes after it
    errors                the first one stops all threads, and is raised when the next tensor is asked for
    the end               threads run until all is read, or until `stop`; the last one out frees the buffers
"""

import ctypes
import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import Any

from torch import Tensor

from olq.errors import ConfigError, OlqError, SourceError, StateError
from olq.reload.carriers import Carrier
from olq.reload.headers import Entry, Header, identity_of
from olq.reload.options import Staging
from olq.reload.staging_plan import DTYPES, Piece, plan_reads


@dataclass(slots=True)
class _Arriving:
    """A tensor with memory: its bytes, itself, how many bytes are still to be copied, and a mark behind its copies."""

    memory: Tensor
    tensor: Tensor
    left: int
    mark: Any = None


class Staged:
    """Files that are read ahead of whoever takes their tensors. Read once.

    Args:
        headers: the files, checked; every dtype is in `DTYPES`.
        carrier: brings bytes to the device.
        staging: sizes.
        piece_bytes: as for `plan_reads`.
    """

    def __init__(
        self,
        headers: Sequence[Header],
        carrier: Carrier,
        staging: Staging,
        piece_bytes: int | None = None,
    ) -> None:
        self._headers, self._carrier, self.staging = headers, carrier, staging
        self._entries = [entry for header in headers for entry in header.entries]
        self._reads = plan_reads(headers, staging.buffer_bytes, piece_bytes)
        # A collection in a thread that holds the lock may close another's generator, which calls `stop`: reentrant.
        self._lock = threading.RLock()
        #: Something arrived, or ended.
        self._news = threading.Condition(self._lock)
        #: Memory on the device may be used again.
        self._room = threading.Condition(self._lock)
        #: A slot may be used again.
        self._emptied = threading.Condition(self._lock)
        self._making = threading.Lock(), threading.Lock()
        self._buffers: list[list[_Slot]] = [[], []]
        self._next = 0
        #: Marks behind the copies out of pieces that were sent, until their slots are used again.
        self._sent: dict[int, Any] = {}
        self._made = 0
        self._arriving: dict[int, _Arriving] = {}
        self._small, self._large = 0, False
        self._threads: list[threading.Thread] = []
        self._running, self._stopped, self._taken = 0, False, False
        self._errors: list[BaseException] = []

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors in file order. Threads start with the first one that is asked for.

        Raises:
            SourceError: a file has changed since its header was read, is shorter than it said, or can't be read.
            ConfigError: there is no memory for the buffers, or a thread can't be started.
            StateError: `stop` was called by somebody else, or tensors were asked for a second time; whoever takes them
                already goes on.
        """
        self._claim()
        try:
            self._start()
            for number, entry in enumerate(self._entries):
                tensor = self._take(number)
                yield entry.name, tensor
                del tensor
                self._passed(entry)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the threads, and free what they hold. A second time changes nothing; any thread may call it."""
        with self._lock:
            self._stopped = True
            self._wake()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()
        with self._lock:
            if not self._running:
                self._free()

    def _claim(self) -> None:
        with self._lock:
            if self._stopped:
                raise self._ended()
            if self._taken:
                raise self._refused(
                    "These files are being read already.",
                    "tensors asked for a second time, while they are handed out for the first",
                    "one consumer",
                )
            self._taken = True

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise self._ended()
            self._carrier.begin()
            count = min(self.staging.threads, max(len(self._reads.pieces), 1))
            for i in range(count):
                thread = threading.Thread(target=self._work, name=f"olq staging {i}", daemon=True)
                try:
                    thread.start()  # it waits for the lock
                except RuntimeError as error:
                    raise _no_thread(i, count, error) from error
                self._running += 1
                self._threads.append(thread)

    def _take(self, number: int) -> Tensor:
        """Wait for a tensor on the host, and let the device wait for its bytes."""
        with self._lock:
            while not self._errors and not self._stopped:
                arriving = self._arriving.get(number)
                if arriving is not None and not arriving.left:
                    break
                self._news.wait()
            else:
                raise self._errors[0] if self._errors else self._ended()
            del self._arriving[number]
        if arriving.mark is not None:
            self._carrier.receive(arriving.memory, arriving.mark)
        return arriving.tensor

    def _passed(self, entry: Entry) -> None:
        """The consumer has asked for the next tensor."""
        with self._lock:
            if entry.nbytes > self.staging.buffer_bytes:
                self._large = False
            else:
                self._small -= entry.nbytes
            self._room.notify_all()

    def _work(self) -> None:
        """What a reading thread does."""
        files = _Files(self._headers)
        slot: _Slot | None = None
        try:
            with self._carrier.attached():
                self._memory(-1)  # of tensors without bytes at the very beginning, which no piece belongs to
                while (piece := self._take_piece()) is not None:
                    with self._about(piece):
                        slot = self._slot(piece)
                        self._read(files, piece, slot)
                        self._send(piece, slot)
        except BaseException as error:  # raised again by the consumer
            for one in (error, error.__cause__):  # frames would hold a buffer for as long as the error lives
                if one is not None:
                    traceback.clear_frames(one.__traceback__)
            self._fail(error)
        finally:
            slot = None
            files.close()
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._free()
                self._wake()

    def _take_piece(self) -> Piece | None:
        """The next piece, once its buffer may be written; None at the end."""
        with self._lock:
            if self._stopped or self._next == len(self._reads.pieces):
                return None
            piece = self._reads.pieces[self._next]
            self._next += 1
            before = piece.number - 2 * self._reads.slots
            while before >= 0 and before not in self._sent and not self._stopped:
                self._emptied.wait()
            if self._stopped:
                return None
            mark = self._sent.pop(before, None)
        if mark is not None:
            with self._about(self._reads.pieces[before]):
                self._carrier.finish(mark)
        return piece

    def _slot(self, piece: Piece) -> "_Slot":
        """The piece's place in a buffer, which the first thread to need it makes: the others read meanwhile."""
        reads = self._reads
        which, place = divmod(piece.number % (2 * reads.slots), reads.slots)
        with self._making[which]:
            slots = self._buffers[which]
            if not slots:
                buffer = self._carrier.host_buffer(reads.slots * reads.slot_bytes)
                slots.extend(_Slot(memory) for memory in buffer.split(reads.slot_bytes))
            return slots[place]

    def _read(self, files: "_Files", piece: Piece, slot: "_Slot") -> None:
        try:
            files.read(piece, slot)
        except (OSError, EOFError) as error:
            raise _unreadable(self._where(piece), f"{type(error).__name__}: {error}") from error

    def _send(self, piece: Piece, slot: "_Slot") -> None:
        """Begin to copy what was read; say of each tensor that is complete by that."""
        for part in piece.parts:
            memory = self._memory(part.tensor)
            if memory is None:
                return
            self._carrier.copy(
                memory[part.into : part.into + part.size], slot.memory[part.at : part.at + part.size]
            )
            del memory  # or this thread would hold a tensor that the consumer has dropped
            with self._lock:  # one at a time: a mark has to lie behind the copies of all who counted before
                self._count(self._arriving[part.tensor], part.size)
        with self._lock:
            self._sent[piece.number] = self._carrier.mark()
            self._emptied.notify_all()

    def _count(self, arriving: _Arriving, size: int) -> None:
        """Note that bytes of a tensor have been sent."""
        arriving.left -= size
        if not arriving.left:
            arriving.mark = self._carrier.mark()
            self._news.notify_all()

    def _memory(self, number: int) -> Tensor | None:
        """Memory of a tensor, made after that of all tensors before it; None if the reading was stopped.

        A thread that waits here holds no bytes of an earlier tensor that it has not sent.
        """
        with self._lock:
            while not self._stopped:
                self._make()
                if self._made > number:
                    return self._arriving[number].memory if number >= 0 else None
                self._room.wait()
        return None

    def _make(self) -> None:
        """Make memory for the next tensors, as far as there is room."""
        while self._made < len(self._entries):
            entry = self._entries[self._made]
            large = entry.nbytes > self.staging.buffer_bytes
            if self._large if large else self._small + entry.nbytes > 2 * self.staging.buffer_bytes:
                return
            memory = self._carrier.allocate(entry.nbytes)
            tensor = memory.view(DTYPES[entry.dtype]).view(entry.shape)
            self._arriving[self._made] = _Arriving(memory, tensor, entry.nbytes)
            if large:
                self._large = True
            else:
                self._small += entry.nbytes
            self._made += 1
            if not entry.nbytes:
                self._news.notify_all()

    @contextmanager
    def _about(self, piece: Piece) -> Iterator[None]:
        """Errors in here that do not say where name this piece."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, OlqError):
                error.add_note(f"while olq staged {self._where(piece)}")
            raise

    def _where(self, piece: Piece) -> str:
        names = ", ".join(repr(self._entries[part.tensor].name) for part in piece.parts[:3])
        more = f" and {len(piece.parts) - 3} more" if len(piece.parts) > 3 else ""
        return f"{self._headers[piece.file].file}, in bytes of {names}{more}"

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._errors:
                self._errors[0].add_note(f"another reading thread failed too: {error}")
            else:
                self._errors.append(error)
            self._stopped = True
            self._wake()

    def _free(self) -> None:
        """No thread runs any more: the buffers are not needed, nor is what nobody will take."""
        self._buffers = [[], []]
        if self._stopped:
            self._carrier.abandon([one.memory for one in self._arriving.values()])
            self._arriving.clear()

    def _wake(self) -> None:
        for condition in (self._news, self._room, self._emptied):
            condition.notify_all()

    def _ended(self) -> StateError:
        return self._refused(
            "The reading of these files has ended.",
            "a tensor asked for after the load that opened the files had ended, or for a second time",
            "tensors taken while their load runs",
        )

    def _refused(self, problem: str, found: str, need: str) -> StateError:
        files = ", ".join(str(header.file) for header in self._headers[:3])
        return StateError(problem, where=files, found=found, need=need, remedy="load again")


class _Slot:
    """A share of a buffer, as a tensor and for a file to read into."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.view = memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())).cast("B")


class _Files:
    """The file that one thread reads, open."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers, self._number = headers, -1
        self._raw: FileIO | None = None

    def read(self, piece: Piece, slot: _Slot) -> None:
        """Read a piece.

        Raises:
            SourceError: the file has changed since its header was read: looked at again after the bytes, so that what
                is handed on was read before anybody wrote to it.
            OSError: it can't be read.
            EOFError: it is shorter than it said.
        """
        if self._number != piece.file or self._raw is None:
            self._open(piece.file)
        raw = self._raw
        if raw is None:
            return
        raw.seek(piece.offset)
        done = 0
        while done < piece.size:
            count = raw.readinto(slot.view[done : piece.size])
            if not count:
                raise EOFError(f"the file ends at byte {piece.offset + done}")
            done += count
        self._check(raw)

    def close(self) -> None:
        """Close what is open."""
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def _open(self, number: int) -> None:
        self.close()
        self._raw, self._number = FileIO(self._headers[number].file), number
        self._check(self._raw)

    def _check(self, raw: FileIO) -> None:
        """Refuse an open file that is another, or was written to, since its header was read."""
        header = self._headers[self._number]
        if identity_of(os.fstat(raw.fileno())) != header.identity:
            raise _unreadable(str(header.file), "another file, or another content, than when the load began")


def _no_thread(started: int, count: int, error: RuntimeError) -> ConfigError:
    return ConfigError(
        "A thread that reads files can't be started.",
        where="olq.Staging(threads=...)",
        found=f"{error}, after {started} of {count}",
        need="as many threads as `threads` says, or as there are pieces of files to read if these are fewer",
        remedy="pass a smaller staging=olq.Staging(threads=...), or staging=None to read files without threads",
    )


def _unreadable(where: str, found: str) -> SourceError:
    return SourceError(
        "A file of the checkpoint could not be read to its end.",
        where=where,
        found=found,
        need="whole files that stay as they are while they are loaded",
        remedy="see that nobody writes to the checkpoint, fetch this file again if it is short, and load again",
    )
