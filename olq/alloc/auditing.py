"""The audit: which bytes of kernel-owned memory did nobody write, and whose padding was written over?

Memory that `allocate` makes inside an audit starts as poison (olq.alloc.poison). It is judged by what it
holds in the end, so it makes no difference who wrote it: torch, Triton, another library. Off, the audit costs
one comparison with None an allocation.

One look at one pattern can't tell an unwritten byte from one that was written with its poison's value:

    with audit(): ...  runs a block once, each tensor on a random pattern of its own. What chance explains is
    not
                       reported, but counted in `unsettled`. Float elements are settled by their payload; of
                       bytes, any 8 or so unwritten ones in a run or in one row, column or other slice are
                       found. A tensor is blamed wrongly with probability below 2**-40.
    run_audited(f)     in olq.alloc.twice: runs f on two patterns. Exact.
"""

import gc
import threading
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType

import torch
from torch import Tensor

from olq.alloc import memory
from olq.alloc.findings import Finding, raise_findings
from olq.alloc.places import allocator_bytes, produced_bytes, sure
from olq.alloc.poison import poison_, still_poison
from olq.alloc.spec import TensorSpec

_active: list["Audit"] = []
_lock = threading.RLock()
_seeds = count()


@dataclass
class Watch:
    """One poisoned storage and, once judged, its bytes that still held poison and its dirty padding.

    Args:
        owner: who has to write it.
        spec: what it was made from.
        seed: which poison.
        flipped: which of the seed's two patterns.
        storage: its bytes; None once it has been judged and nobody else held it.
    """

    owner: str
    spec: TensorSpec
    seed: int
    flipped: bool
    storage: Tensor | None
    address: int = field(init=False, default=0)
    held: Tensor = field(init=False, default_factory=lambda: torch.empty(0, dtype=torch.int64))
    dirty: Tensor = field(init=False, default_factory=lambda: torch.empty(0, dtype=torch.int64))
    dropped: bool = field(init=False, default=False)  # untouched, and nobody holds it any more: given up

    def __post_init__(self) -> None:
        if self.storage is not None:
            self.address = self.storage.data_ptr()
            poison_(self.storage, self.spec.dtype, self.seed, flipped=self.flipped)

    def judge(self) -> Tensor:
        """Positions of bytes that hold poison, int64 on the CPU, without padding that the allocator wrote."""
        if self.storage is not None:
            self.held = still_poison(self.storage, self.spec.dtype, self.seed, flipped=self.flipped).cpu()
            written = allocator_bytes(self.spec)
            if written is not None:
                filled, values = written
                self.held = self.held[~filled[self.held]]
                self.dirty = (filled & (self.storage.cpu() != values)).nonzero().flatten()
        return self.held

    def dirty_padding(self) -> list[Finding]:
        """Padding that no longer holds what the allocator wrote there; none or one."""
        return [Finding.of(self.owner, self.spec, self.dirty.tolist(), "padding")] if len(self.dirty) else []

    @property
    def is_untouched(self) -> bool:
        """Whether nobody wrote a byte, as far as one look tells."""
        return len(self.judge()) == produced_bytes(self.spec) > 0

    def release(self) -> None:
        """Judge and let go of a storage that nobody else holds."""
        if self.storage is not None and is_last_holder(self.storage):
            self.dropped = self.is_untouched
            self.storage = None


class Audit:
    """Poison for what is allocated inside the block, and a verdict at its end. Made by `audit()`.

    Attributes:
        findings: what was found; filled at the end of the block.
        unsettled: bytes that hold their poison as often as written ones would by chance.
    """

    #: Keep each storage, with its content, until the audit itself goes.
    keeps = False

    def __init__(self, *, strict: bool = True, seed: int | None = None, flipped: bool = False) -> None:
        self.findings: list[Finding] = []
        self.unsettled = 0
        self.watches: list[Watch] = []
        # Each audit has patterns of its own: an inner one may poison what an outer one watches.
        # A CPU generator uses the low 32 bits of a seed only.
        self.seed = next(_seeds) * 1_000_003 if seed is None else seed
        self._strict, self._flipped = strict, flipped
        self._sweep_at = 64

    def __enter__(self) -> "Audit":
        with _lock:
            _active.append(self)
            memory.on_allocate = _poison_new
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _active.remove(self)
            memory.on_allocate = _poison_new if _active else None
        if kind is None:
            self._finish()
        else:
            self.watches.clear()

    def watch(self, tensor: Tensor, *, owner: str, spec: TensorSpec | None = None) -> None:
        """Poison a tensor that exists already and audit it from here on: a buffer that each step overwrites.

        Its content is lost; padding that `spec.order` owns is written anew.

        Args:
            tensor: on a real device; without a spec, one whose elements don't share places.
            owner: who has to write it.
            spec: what it was allocated from.

        Raises:
            LayoutError: the tensor is not what the spec says, or of a dtype that kernel tensors don't have.
        """
        if spec is None:
            size = tensor.element_size()
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.stride(), alignment=size)
        with torch.inference_mode(False), torch.no_grad():
            self.poison(memory.storage_elements(tensor.detach(), spec), spec, owner)
            memory.write_padding_(tensor.detach(), spec)

    def poison(self, flat: Tensor, spec: TensorSpec, owner: str) -> None:
        """Poison the elements of a storage and watch them; `allocate` and `watch` call it."""
        with _lock:
            seed = self.seed + len(self.watches)
            self.watches.append(Watch(owner, spec, seed, self._flipped, flat.view(torch.uint8)))
            if len(self.watches) >= self._sweep_at and not self.keeps:
                self._sweep()

    def _sweep(self) -> None:
        """Let go of what nobody else holds: an audit holds little more memory than the program does."""
        _synchronize(self.watches)
        for watch in self.watches:
            watch.release()
        alive = sum(watch.storage is not None for watch in self.watches)
        self._sweep_at = len(self.watches) + max(alive, 64)

    def _finish(self) -> None:
        _synchronize(self.watches)
        if any(watch.storage is not None and watch.is_untouched for watch in self.watches):
            gc.collect()  # an exception's frames may be all that still holds a tensor which it left unwritten
        for watch in self.watches:
            watch.release()
            if watch.dropped:
                continue
            held = watch.judge()
            self.findings += watch.dirty_padding()
            blamed = sure(watch.spec, held)
            self.unsettled += len(held) - len(blamed)
            if len(blamed):
                self.findings.append(Finding.of(watch.owner, watch.spec, blamed.tolist()))
        self.watches.clear()
        if self._strict:
            raise_findings(self.findings)


def audit(*, strict: bool = True) -> Audit:
    """Run a block once on poisoned memory: `with olq.alloc.audit() as audit: ...`.

    What is allocated inside the innermost audit, by any thread, is judged by that audit, at the end of the
    block or when nobody holds the memory any more. Memory that was made and dropped without a byte written is
    not reported, nor anything when the block raises.

    Args:
        strict: False collects `audit.findings` and does not raise.

    Returns:
        A context manager.

    Raises:
        CoverageError: at the end of the block; names tensor, coordinates and owner of unwritten bytes.
    """
    return Audit(strict=strict)


def abandon(*tensors: Tensor) -> None:
    """Tell audits that nobody will read these tensors, though somebody holds them: a load that was given up.

    Args:
        tensors: kernel-owned tensors, or parameters that share their storage. Without an audit nothing
            happens.
    """
    if not _active:
        return
    addresses = {t.data_ptr() for t in tensors if not t.is_meta}
    with _lock:
        for each in _active:
            for watch in each.watches:
                if watch.storage is not None and watch.address in addresses:
                    watch.storage, watch.dropped = None, True


def is_last_holder(storage: Tensor) -> bool:
    """Whether this tensor alone holds its storage."""
    return _holders(storage) <= _holders(torch.empty(1, dtype=torch.uint8))


def _holders(t: Tensor) -> int:
    # torch has no public way to ask; its own CUDA-graph trees ask like this.
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _synchronize(watches: list[Watch]) -> None:
    """Wait for producers on other streams."""
    for device in {watch.storage.device for watch in watches if watch.storage is not None}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _poison_new(flat: Tensor, spec: TensorSpec, owner: str) -> None:
    with _lock:
        if _active:
            _active[-1].poison(flat, spec, owner)
