"""Poison: bytes that no producer is likely to write, and that show in what a reader computes.

Pattern   uint8 and int32: pseudo-random bytes. Floats: quiet NaNs with a pseudo-random payload that is never
          0, so never the NaN that arithmetic makes. A function of seed and position, on each kind of device.
Flipped   differs from the pattern of the same seed in each byte. Floats: finite, between 1.5 and 2, so that
          what is computed from poison is NaN once and finite once.

Memory: one chunk of 1 MiB besides the tensor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 20

# For each byte of an element, lowest first: random bits kept, bits set, bits inverted when flipped.
# The lowest two payload bits are 01: an arithmetic NaN has the payload 0.
_RANDOM = ((0xFF, 0x00, 0xFF),)
_FORM = {
    torch.float32: ((0xFC, 0x01, 0xFF), (0xFF, 0x00, 0xFF), (0x3F, 0xC0, 0x3F), (0x00, 0x7F, 0x40)),
    torch.bfloat16: ((0x3C, 0xC1, 0x3F), (0x00, 0x7F, 0x40)),
    torch.float16: ((0xFC, 0x01, 0xFF), (0x01, 0x7E, 0x41)),
}


def poison_(storage: Tensor, dtype: torch.dtype, seed: int, *, flipped: bool = False) -> None:
    """Overwrite a storage with poison.

    Args:
        storage: uint8, flat: whole elements of `dtype`.
        dtype: of the tensor in it; decides the pattern.
        seed: which pattern.
        flipped: the second pattern of this seed, which differs from the first in each byte.
    """
    for start, pattern in _pattern(storage, dtype, seed, flipped):
        storage[start : start + pattern.numel()] = pattern


def still_poison(storage: Tensor, dtype: torch.dtype, seed: int, *, flipped: bool = False) -> Tensor:
    """Positions, int64 and ascending, of the bytes that hold what `poison_` wrote there.

    Args:
        storage: as given to `poison_`.
        dtype: as given to `poison_`.
        seed: as given to `poison_`.
        flipped: as given to `poison_`.
    """
    found = [
        (storage[start : start + pattern.numel()] == pattern).nonzero().flatten().add_(start)
        for start, pattern in _pattern(storage, dtype, seed, flipped)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=storage.device)


def _pattern(storage: Tensor, dtype: torch.dtype, seed: int, flipped: bool) -> Iterator[tuple[int, Tensor]]:
    device = storage.device
    # Generators exist for CPU and CUDA; elsewhere the pattern is drawn on the CPU and moved.
    home = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(home).manual_seed(seed)
    forms = torch.tensor(_FORM.get(dtype, _RANDOM), dtype=torch.uint8, device=home)
    keep, put, flip = forms.unbind(1)
    for start in range(0, storage.numel(), _CHUNK):
        size = min(_CHUNK, storage.numel() - start)
        count = -(-size // 8)  # words; a chunk holds whole ones, so only the last one is cut
        words = torch.randint(
            -(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=home, generator=generator
        )
        pattern = words.view(torch.uint8).view(-1, len(forms)).bitwise_and_(keep).bitwise_or_(put)
        if flipped:
            pattern.bitwise_xor_(flip)
        yield start, pattern.view(-1)[:size].to(device)
