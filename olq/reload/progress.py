"""One parameter during one load: what has arrived, and what is done with each arrival.

An arrival is (box of the parameter, source, name). A parameter that stays in high precision has been written already;
only its coverage is kept. A quantized one is in `olq.reload.quantized`.
"""

from collections.abc import Sequence
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from olq.errors import CoverageError
from olq.reload.checks import check_shape, check_values, same_bytes
from olq.reload.region import Box, Coverage, Masks, boxes, describe, slices

if TYPE_CHECKING:
    from olq.reload.quantized import QuantizedWeight

#: Staged units that were stored, with their boxes.
Stored = list[tuple["QuantizedWeight", Box]]


class Progress:
    """What has arrived of one parameter.

    Args:
        label: the parameter's full name.
        parameter: the load-format Parameter.
    """

    def __init__(self, label: str, parameter: Tensor) -> None:
        self.label, self.parameter = label, parameter
        self.coverage = Coverage(parameter.shape)
        self.arrivals = 0
        #: Elements that have been claimed and whose bytes are still to be written.
        self.waiting = 0
        #: Whether its memory, or its kernel tensors, may have been written in this load.
        self.touched = False
        #: Quantized weights that take every write to this parameter too (a quantized head tied to an embedding).
        self.followers: list[QuantizedWeight] = []
        self._lock = RLock()

    def check_new(self, box: Box, name: str) -> None:
        """Raise if an element of `box` has arrived before.

        Raises:
            CoverageError: it names both arrivals.
        """
        before = self.coverage.find(box)
        if before is not None:
            raise self._twice(box, before, name)

    def claim(self, box: Box, product: Masks, count: int, name: str) -> None:
        """Count an arrival whose bytes are about to be written, or have been queued.

        Args:
            box: its elements, at least one.
            product: `masks(box)`.
            count: `size(box)`.
            name: what it is called.

        Raises:
            CoverageError: an element arrived before.
        """
        with self._lock:
            before = self.coverage.claim(box, product, count, name)
            if before is not None:
                raise self._twice(box, before, name)
            self.arrivals += 1
            self.touched = True
            self.waiting += count

    def settle(self, count: int) -> None:
        """Note that elements that were claimed have been written, or never will be."""
        with self._lock:
            self.waiting -= count

    def _twice(self, box: Box, before: str, name: str) -> CoverageError:
        return CoverageError(
            "The same elements arrived twice.",
            where=f"{self.label}{describe(box)}",
            found=f"{before!r}, and then {name!r}",
            need="each element once a load",
            remedy="remove the duplicate from the source, or start another load to replace the weights",
        )

    def retract(self, box: Box) -> None:
        """Take an arrival back, because another one of the same call failed: the call may be repeated."""
        with self._lock:
            self.coverage.remove(box)
            for follower in self.followers:
                follower.retract(box)

    def _tell_followers(self, parts: Sequence[tuple[Box, Tensor]], name: str, stored: Stored) -> None:
        """All followers take all parts, or none of them any."""
        done: list[tuple[QuantizedWeight, Box]] = []
        try:
            for follower in self.followers:
                for box, source in parts:
                    follower.arrive(box, source, name, stored)
                    done.append((follower, box))
        except BaseException:
            for follower, box in done:
                follower.retract(box)
            raise

    def holds(self, source: Tensor) -> bool:
        """Whether the parameter is what `source` would make it."""
        raise NotImplementedError

    def missing(self) -> str | None:
        """What has not arrived, in words, or None."""
        if self.coverage.complete:
            return None
        if not self.coverage.count:
            return f"{self.label} (nothing arrived)"
        gaps = ", ".join(map(describe, self.coverage.missing()))
        return (
            f"{self.label} ({self.coverage.count} of {self.coverage.total} elements arrived; missing {gaps})"
        )


class PlainParameter(Progress):
    """A parameter in high precision. Its memory is real and has been written when `arrive` is called.

    Args:
        label: the parameter's full name.
        parameter: with memory.
        shadow: where a shadow load keeps its new values until the commit; None writes them into the parameter.
    """

    def __init__(self, label: str, parameter: Tensor, shadow: torch.device | None = None) -> None:
        super().__init__(label, parameter)
        self._shadow = shadow
        #: The new values of a shadow load, once something was written or read.
        self.twin: Tensor | None = None

    @property
    def shadowed(self) -> bool:
        """Whether writes go to memory beside the parameter's."""
        return self._shadow is not None

    @property
    def memory(self) -> Tensor:
        """Where writes go: the parameter's memory, or its twin of the same strides, which begins as a copy."""
        if self._shadow is None:
            return self.parameter.detach()
        if self.twin is None:
            with torch.inference_mode(False), torch.no_grad():
                mine = self.parameter.detach()
                self.twin = torch.empty_strided(
                    mine.shape, mine.stride(), dtype=mine.dtype, device=self._shadow
                )
                self.twin.copy_(mine)
        return self.twin

    def put(self, box: Box, source: Tensor) -> None:
        """Write values whose arrival has been claimed. Grad mode is off."""
        with self._lock:
            self.memory[slices(box)].copy_(source)

    def arrive(self, box: Box, name: str) -> None:
        """Record a write that has happened, and pass it on to the followers.

        Args:
            box: elements that were written. Those written earlier in the same call are not counted again.
            name: under which name.
        """
        self.arrive_all([box], name)

    def arrive_all(self, written: Sequence[Box], name: str, stored: Stored | None = None) -> list[Box]:
        """Record the writes of one call, or none of them if a follower refuses its values.

        Args:
            written: boxes that may overlap.
            name: under which name.
            stored: as for `QuantizedWeight.arrive`.

        Returns:
            The elements that are new, as disjoint boxes.

        Raises:
            CoverageError: another thread wrote the same elements meanwhile.
        """
        with self._lock:
            for box in written:
                self.check_new(box, name)
            self.arrivals += 1
            new = [part for box in written for some in self.coverage.add(box, name) for part in boxes(some)]
            if not self.followers:
                return new
            if len(new) > 1:  # neighbours become one
                merged = Coverage(self.coverage.shape)
                for part in new:
                    merged.add(part)
                new = merged.boxes()
            units: Stored = [] if stored is None else stored
            try:
                self._tell_followers([(part, self.memory[slices(part)]) for part in new], name, units)
            except BaseException:
                for part in new:
                    self.coverage.remove(part)
                if stored is None:
                    note_lost(units, name)
                raise
            return new

    def copy(self, box: Box, source: Tensor, name: str) -> None:
        """Write `source` and record it.

        Raises:
            CoverageError: an element arrived before.
        """
        check_values(source, self.parameter, self.label, name)
        with self._lock, torch.no_grad():
            self.check_new(box, name)
            self.touched = True
            self.memory[slices(box)].copy_(source)
            self.arrive(box, name)

    def holds(self, source: Tensor) -> bool:
        """Whether the parameter has the values of `source`, rounded to its dtype."""
        mine = self.memory
        return mine.shape == source.shape and same_bytes(mine, source.to(mine.device, mine.dtype))

    def put_back(self, memory: Tensor) -> Tensor:
        """Give the parameter its own memory again after a `parameter.data = x`. Nothing is copied.

        Args:
            memory: an alias of what it had, at the address that is known.

        Returns:
            The values that it had been given.
        """
        values = self.parameter.data
        self.parameter.data = memory
        return values

    def overwrite(self, values: Tensor) -> None:
        """Copy values that came by `parameter.data = x`, without recording them.

        Raises:
            SourceError: another shape, or codes of a quantized tensor.
        """
        check_shape(values, self.parameter, self.label, "parameter.data = ...")
        check_values(values, self.parameter, self.label, "parameter.data = ...")
        self.touched = True
        with torch.no_grad():
            self.memory.copy_(values)


class Outside(Progress):
    """A parameter or kernel tensor that a partial load may not write."""

    def check_new(self, box: Box, name: str) -> None:
        """Refuse every write.

        Raises:
            CoverageError: always.
        """
        raise CoverageError(
            "A write goes outside the declared scope of a partial load.",
            where=self.label,
            found=f"a write by {name!r}",
            need="writes to parameters that the scope covers; the others keep their bytes",
            remedy="leave this tensor out of the source, or widen `scope`",
        )


def note_lost(stored: Stored, name: str) -> None:
    """After a call that failed and was taken back: weights that had stored units with elements of other calls.

    Those elements were in the stage only, and left it with the unit.
    """
    for weight, unit in stored:
        if weight.coverage.find(unit) is not None:
            weight.lose(name)
