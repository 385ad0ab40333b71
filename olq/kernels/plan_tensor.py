"""Launches for a scale of a whole matrix: two sweeps over it, or one launch whose programs wait for each other."""

import torch
from torch import Tensor

from olq.kernels import tiles
from olq.kernels.shapes import (
    SCRATCH,
    Launch,
    Matrices,
    Plan,
    is_dense,
    magnitudes_of,
    strides_of,
    sweep_of,
)


def one_scale(
    shape: Matrices, source: Tensor, codes: Tensor, scale: Tensor, constants: dict[str, object]
) -> Plan:
    """For `plan_fp8.quantize_fp8`: FP8 codes with one scale a matrix. `constants`: POWER, and those of `reading_of`."""
    reading = {name: value for name, value in constants.items() if name != "POWER"}
    first, count = magnitudes_of(shape, source, reading)
    sweep = sweep_of(tiles.encoding, shape, source, codes)
    second = Launch(
        "tensor.quantize_tensor",
        (0, 1, 2, SCRATCH),
        (
            *sweep.numbers,
            count,
            *strides_of(shape.steps[0], source),
            *strides_of(shape.steps[1], codes),
            shape.steps[2],
        ),
        {**constants, "COUNT": tiles.power_of_two(count), **sweep.tiling(source, codes)},
        (sweep.programs, 1, shape.matrices),
        sweep.tile.warps,
        waits=True,
    )
    return Plan((first, second), count * shape.matrices, _together(shape, source, codes, constants))


def _together(shape: Matrices, source: Tensor, codes: Tensor, constants: dict[str, object]) -> Plan | None:
    """One launch for a dense matrix of 16-bit elements that are not changed, if of a size for which it is faster."""
    elements = shape.n * shape.k
    programs, unit = tiles.TOGETHER, 2 * tiles.UNIT_WORDS
    aligned = not (source.data_ptr() | codes.data_ptr()) & 15
    dense = aligned and is_dense(shape.k, source, codes)
    plain = source.element_size() == 2 and not constants["THROUGH"] and not constants["LARGEST"]
    fits = tiles.LEAST_TOGETHER <= elements <= tiles.LARGEST_TOGETHER and elements % 2 == 0
    if not (shape.matrices == 1 and dense and plain and fits):
        return None
    held = next(held for held in tiles.HELD if programs * held * unit <= elements)
    slots: dict[str, object] = {"PROGRAMS": programs, "SLOTS": tiles.power_of_two(programs)}
    first = Launch("tensor_once.clear", (SCRATCH,), (), slots, (1, 1, 1), 4)
    second = Launch(
        "tensor_once.quantize_tensor",
        (0, 1, 2, SCRATCH),
        (elements,),
        {
            "POWER": constants["POWER"],
            "BFLOAT16": source.dtype == torch.bfloat16,
            "UNIT": tiles.UNIT_WORDS,
            "HELD": held,
            "AHEAD": tiles.HELD_AHEAD,
            "TAIL": elements % unit != 0,
            **slots,
        },
        (programs, 1, 1),
        tiles.TOGETHER_WARPS,
        {"maxnreg": tiles.TOGETHER_REGISTERS, "num_stages": 1},
        waits=True,
        together=True,
    )
    return Plan((first, second), programs)
