"""Shapes and strides as integers: how much storage they reach, and whether two elements share a place."""

from collections.abc import Sequence


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements, as torch gives them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one reached, both included; 0 for an empty shape."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """False only if no two elements are sure to share a place.

    The test is the usual sufficient one: sorted by stride, each dimension steps over all that the smaller
    ones reach. Exotic strides that interleave without touching count as overlapping.
    """
    if 0 in shape:
        return False
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False
