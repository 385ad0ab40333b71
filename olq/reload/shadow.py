"""A load beside the weights that serve: copied into their addresses at the commit, taken back if the commit fails.

Copies are enqueued on the current stream, in pieces of bounded size, so that a forward on the same stream sees the old
model or the new one.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from olq.methods.state import state_of
from olq.reload.progress import PlainParameter

#: The most bytes that an exchange keeps aside at one time.
PIECE_BYTES = 64 << 20


class Shadow:
    """New bytes that wait for the commit.

    Args:
        layers: open in a shadow load.
        plains: parameters in high precision.
    """

    def __init__(self, layers: Iterable[nn.Module], plains: Iterable[PlainParameter]) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for layer in layers:
            state = state_of(layer)
            for name, weight in state.open.weights.items():
                if weight.made:
                    self._pairs += [
                        (state.kernel[name + suffix], weight.tensors[suffix])
                        for suffix in weight.plan.tensors
                    ]
        self._pairs += [(one.parameter.detach(), one.twin) for one in plains if one.twin is not None]

    def put(self, *, keep_old: bool) -> None:
        """Copy into the live addresses.

        Args:
            keep_old: exchange instead, so that `undo` is possible. Costs a read and a write more of each byte.
        """
        with torch.no_grad():
            for live, new in self._pairs:
                exchange_(live.detach(), new) if keep_old else live.detach().copy_(new)

    def undo(self) -> None:
        """Bring the old bytes back, after `put(keep_old=True)`."""
        self.put(keep_old=True)


def exchange_(a: Tensor, b: Tensor) -> None:
    """Swap the elements of two tensors of one shape and dtype, on any two devices. Scratch: up to 64 MiB."""
    for one, other in zip(_pieces(a), _pieces(b), strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in views of at most `PIECE_BYTES`, cut along its first dimensions."""
    if tensor.numel() * tensor.element_size() <= PIECE_BYTES or not tensor.dim():
        yield tensor
        return
    rows = max(PIECE_BYTES * len(tensor) // (tensor.numel() * tensor.element_size()), 1)
    for part in tensor.split(rows):
        if len(part) == 1:
            yield from _pieces(part[0])
        else:
            yield part
