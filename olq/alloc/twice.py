"""The exact audit: run a program twice, on two poisons that differ in each byte, and compare.

    poison in both runs              nobody wrote the byte
    different, and not both poison   the byte was computed from memory that nobody wrote
    else                             written, and well

This is exact for a program that is deterministic and allocates the same memory in the same order each time.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from olq.alloc.auditing import Audit, Watch
from olq.alloc.findings import Finding, raise_findings
from olq.alloc.spec import TensorSpec
from olq.errors import StateError

T = TypeVar("T")


class _Recording(Audit):
    """Keeps every storage and leaves the verdict to `run_audited`."""

    keeps = True

    def _finish(self) -> None:
        for watch in self.watches:
            watch.judge()


def run_audited(run: Callable[[], T], *, strict: bool = True, findings: list[Finding] | None = None) -> T:
    """Call `run` twice, on memory with two different poisons.

    Args:
        run: a deterministic call that allocates through olq.alloc.
        strict: False does not raise for findings.
        findings: gets what was found.

    Returns:
        What the second call returned. Tensors in it (also inside lists, tuples and mappings) are compared
        between the calls too: where they differ, something read memory that nobody wrote.
        Memory: everything that either call allocated, until this one returns.

    Raises:
        CoverageError: names the bytes that nobody wrote, or that depend on such bytes.
        StateError: the two calls allocated differently, so their memory can't be compared.
    """
    with _Recording() as first:
        result_a = run()
    with _Recording(seed=first.seed, flipped=True) as second:
        result_b = run()
    found = []
    for a, b in zip_longest(first.watches, second.watches):
        found += _compare(*_same_allocation(a, b))
    known = {w.address for each in (first, second) for w in each.watches}
    for path, a, b in _pairs("the returned value", result_a, result_b):
        if not {_address(a), _address(b)} <= known:  # what was allocated inside has been judged already
            found += _compare_values(path, a, b)
    if findings is not None:
        findings += found
    if strict:
        raise_findings(found)
    return result_b


def _compare(a: Watch, b: Watch) -> Iterator[Finding]:
    held = a.held[torch.isin(a.held, b.held)]
    if len(held):
        yield Finding.of(a.owner, a.spec, held.tolist())
    yield from b.dirty_padding()
    if a.storage is not None and b.storage is not None:
        differing = (a.storage != b.storage).nonzero().flatten().cpu()
        derived = differing[~torch.isin(differing, torch.cat((held, b.dirty)))]
        if len(derived):
            yield Finding.of(a.owner, a.spec, derived.tolist(), "derived")


def _compare_values(path: str, a: Tensor, b: Tensor) -> Iterator[Finding]:
    if a.is_meta or (a.shape, a.dtype) != (b.shape, b.dtype):
        return
    spec = TensorSpec((a.numel() * a.element_size(),), torch.uint8, alignment=1)
    differing = (_bytes(a) != _bytes(b)).nonzero().flatten().tolist()
    if differing:
        yield Finding.of(f"{path}, {a.dtype} {list(a.shape)}", spec, differing, "derived")


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)


def _address(t: Tensor) -> int:
    return 0 if t.is_meta else t.data_ptr()


def _pairs(path: str, a: object, b: object) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors at equal places of two results."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        yield path, a, b
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            yield from _pairs(f"{path}[{key!r}]", a[key], b.get(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _pairs(f"{path}[{i}]", x, y)


def _same_allocation(a: Watch | None, b: Watch | None) -> tuple[Watch, Watch]:
    if a is None or b is None or (a.owner, a.spec) != (b.owner, b.spec):
        raise StateError(
            "The two runs of an audited call allocated differently.",
            where="olq.alloc.run_audited",
            found=f"{_name(a)} in the first run, {_name(b)} in the second, at the same place",
            need="the same tensors in the same order each time",
            remedy="clear caches between the runs, or use the block form: with olq.alloc.audit()",
        )
    return a, b


def _name(watch: Watch | None) -> str:
    return "nothing" if watch is None else f"{watch.owner} {list(watch.spec.shape)} {watch.spec.dtype}"
