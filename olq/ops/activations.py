"""Operators for activations: schemas, shape rules, fakes. No arithmetic.

Two forms. With a last underscore they write into storage of the caller, like those for weights, whose
`quantize_fp8_`, `quantize_mxfp8_` and `quantize_nvfp4_` serve activations too. Without, they make codes and scale
in olq.alloc, padding included, and write them: so a compiled graph holds one node that makes memory as it is made
everywhere else, with its strides, alignment and audit, whatever the number of rows is. The functions behind these get
what was made first, and write it.

Meaning of every argument: olq.activations, olq.numerics.activations and docs/formats/activations.md.
"""

import math

import torch
from torch import Tensor

from olq import alloc
from olq.formats import MXFP8_BLOCK, NVFP4_BLOCK, SCALE_LAYOUTS, exponent_rule
from olq.numerics import activations, fp8, mxfp8, nvfp4
from olq.numerics.places import Places
from olq.ops.declare import (
    check_dtype,
    check_matrix,
    check_same_device,
    check_shape,
    check_source,
    fail,
    operator,
)

GROUP_LAYOUTS = ("row_major", "mn_major", "ue8m0_words")
LARGEST_GROUP = 4096
_Pair = tuple[Tensor, Tensor]
_SILU = (
    "int group=128, bool power_of_two=True, float? limit=None, float alpha=1.0, float beta=0.0, "
    "ScalarType? through=None"
)


# -- checks -------------------------------------------------------------------------------------------------


def _check_group(name: str, group: int) -> None:
    if not 1 <= group <= LARGEST_GROUP:
        fail(name, "group", group, f"1 to {LARGEST_GROUP} columns")


def _check_layout(name: str, layout: str, layouts: tuple[str, ...]) -> None:
    if layout not in layouts:
        fail(name, "scale_layout", repr(layout), f"one of {', '.join(layouts)}")


def _check_gate(
    name: str,
    gate: Tensor,
    up: Tensor,
    limit: float | None,
    alpha: float,
    beta: float,
    through: torch.dtype | None,
) -> None:
    check_source(name, gate, through)
    check_dtype(name, "up", up, gate.dtype)
    check_shape(name, "up", up, tuple(gate.shape))
    check_same_device(name, gate=gate, up=up)
    if limit is not None and not 0 < limit < math.inf:
        fail(name, "limit", limit, "None, or a positive finite number")
    for argument, number in (("alpha", alpha), ("beta", beta)):
        if not math.isfinite(number):
            fail(name, argument, number, "a finite number")


def _check_quantize_fp8_words(source: Tensor, codes: Tensor, words: Tensor, group: int = 128) -> None:
    name = "quantize_fp8_words_"
    check_source(name, source, None)
    _check_group(name, group)
    check_dtype(name, "codes", codes, torch.uint8)
    check_shape(name, "codes", codes, tuple(source.shape))
    check_dtype(name, "words", words, torch.int32)
    check_shape(name, "words", words, activations.words_shape(source.shape, group))
    check_same_device(name, codes=codes, words=words)


def _check_silu_mul_quantize_fp8(
    gate: Tensor,
    up: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int = 128,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> None:
    name = "silu_mul_quantize_fp8_"
    _check_gate(name, gate, up, limit, alpha, beta, through)
    _check_group(name, group)
    check_dtype(name, "codes", codes, torch.uint8)
    check_shape(name, "codes", codes, tuple(gate.shape))
    check_dtype(name, "scale", scale, torch.int32, torch.float32)
    packed = scale.dtype == torch.int32
    shape = activations.words_shape if packed else _groups_shape
    check_shape(name, "scale", scale, shape(gate.shape, group))
    check_same_device(name, codes=codes, scale=scale)


def _groups_shape(shape: torch.Size, group: int) -> tuple[int, ...]:
    return fp8.scale_shape(shape, (1, group))


# -- into storage of the caller -----------------------------------------------------------------------------


@operator(
    "Tensor source, Tensor(a!) codes, Tensor(b!) words, int group=128",
    _check_quantize_fp8_words,
    kernel=True,
)
def quantize_fp8_words_(source: Tensor, codes: Tensor, words: Tensor, group: int = 128) -> None:
    """See `olq.numerics.activations.quantize_words_`."""
    activations.quantize_words_(source, codes, words, group)


@operator(
    f"Tensor gate, Tensor up, Tensor(a!) codes, Tensor(b!) scale, {_SILU}",
    _check_silu_mul_quantize_fp8,
    kernel=True,
)
def silu_mul_quantize_fp8_(
    gate: Tensor,
    up: Tensor,
    codes: Tensor,
    scale: Tensor,
    group: int = 128,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> None:
    """See `olq.numerics.activations.silu_mul_quantize_`."""
    activations.silu_mul_quantize_(
        gate,
        up,
        codes,
        scale,
        group,
        power_of_two=power_of_two,
        limit=limit,
        alpha=alpha,
        beta=beta,
        through=through,
    )


# -- into new memory ----------------------------------------------------------------------------------------


def _codes_like(x: Tensor, columns: int | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] if columns is None else columns), dtype=torch.uint8)


def _fake_groups(x: Tensor, layout: str, group: int) -> _Pair:
    """Codes and group scales without memory, in the strides that olq.alloc gives them."""
    *lead, rows, _ = x.shape
    groups = -(-x.shape[-1] // group)
    if layout == "row_major":
        return _codes_like(x), x.new_empty((*lead, rows, groups), dtype=torch.float32)
    width, dtype = (-(-groups // 4), torch.int32) if layout == "ue8m0_words" else (groups, torch.float32)
    aligned = -(-rows // 4) * 4
    strides, step = [1, aligned], aligned * width
    for extent in reversed(lead):
        strides.insert(0, step)
        step *= extent
    return _codes_like(x), x.new_empty_strided((*lead, rows, width), strides, dtype=dtype)


def _fake_blocks(x: Tensor, layout: str, block: int) -> Tensor:
    *lead, rows, columns = x.shape
    blocks = -(-columns // block)
    if layout == "swizzled_128x4":
        rows, blocks = -(-rows // 128) * 128, -(-blocks // 4) * 4
    return x.new_empty((*lead, rows, blocks), dtype=torch.uint8)


def _room(x: Tensor) -> tuple[tuple[int, ...], int, int]:
    *lead, rows, columns = x.shape
    return tuple(lead), rows, columns


def _check_token(x: Tensor, power_of_two: bool = False) -> None:
    check_source("quantize_fp8_token", x, None)


def _fake_token(x: Tensor, power_of_two: bool = False) -> _Pair:
    return _codes_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _make_token(x: Tensor, power_of_two: bool = False) -> _Pair:
    lead, rows, columns = _room(x)
    return alloc.fp8_token_output(rows, columns, lead=lead, device=x.device, owner="quantize_fp8_token")


@operator("Tensor x, bool power_of_two=False", _check_token, fake=_fake_token, make=_make_token, kernel=True)
def quantize_fp8_token(codes: Tensor, scale: Tensor, x: Tensor, power_of_two: bool = False) -> None:
    """See `olq.activations.quantize_fp8_token`."""
    fp8.quantize_(x, codes, scale, (1, 0), power_of_two=power_of_two)


def _check_fp8_group(
    x: Tensor, scale_layout: str = "row_major", group: int = 128, power_of_two: bool = False
) -> None:
    name = "quantize_fp8_group"
    check_source(name, x, None)
    _check_group(name, group)
    _check_layout(name, scale_layout, GROUP_LAYOUTS)


def _fake_fp8_group(
    x: Tensor, scale_layout: str = "row_major", group: int = 128, power_of_two: bool = False
) -> _Pair:
    return _fake_groups(x, scale_layout, group)


def _make_fp8_group(
    x: Tensor, scale_layout: str = "row_major", group: int = 128, power_of_two: bool = False
) -> _Pair:
    return _group_output(x, scale_layout, group, "quantize_fp8_group")


@operator(
    'Tensor x, str scale_layout="row_major", int group=128, bool power_of_two=False',
    _check_fp8_group,
    fake=_fake_fp8_group,
    make=_make_fp8_group,
    kernel=True,
)
def quantize_fp8_group(
    codes: Tensor,
    scale: Tensor,
    x: Tensor,
    scale_layout: str = "row_major",
    group: int = 128,
    power_of_two: bool = False,
) -> None:
    """See `olq.activations.quantize_fp8_group`."""
    if scale_layout == "ue8m0_words":
        activations.quantize_words_(x, codes, scale, group)
    else:
        fp8.quantize_(x, codes, scale, (1, group), power_of_two=power_of_two)


def _group_output(x: Tensor, scale_layout: str, group: int, owner: str) -> alloc.CodesAndScale:
    lead, rows, columns = _room(x)
    return alloc.fp8_group_output(
        rows,
        columns,
        scale_layout=scale_layout,  # pyright: ignore[reportArgumentType]  # checked already
        group=group,
        lead=lead,
        device=x.device,
        owner=owner,
    )


def _check_mxfp8(x: Tensor, scale_layout: str = "linear", rule: str = "RCEIL") -> None:
    check_source("quantize_mxfp8", x, None)
    _check_layout("quantize_mxfp8", scale_layout, SCALE_LAYOUTS)
    exponent_rule(rule)


def _fake_mxfp8(x: Tensor, scale_layout: str = "linear", rule: str = "RCEIL") -> _Pair:
    return _codes_like(x), _fake_blocks(x, scale_layout, MXFP8_BLOCK)


def _make_mxfp8(x: Tensor, scale_layout: str = "linear", rule: str = "RCEIL") -> _Pair:
    lead, rows, columns = _room(x)
    return alloc.mxfp8_output(
        rows,
        columns,
        scale_layout=scale_layout,  # pyright: ignore[reportArgumentType]  # checked already
        lead=lead,
        device=x.device,
        owner="quantize_mxfp8",
    )


@operator(
    'Tensor x, str scale_layout="linear", str rule="RCEIL"',
    _check_mxfp8,
    fake=_fake_mxfp8,
    make=_make_mxfp8,
    kernel=True,
)
def quantize_mxfp8(
    codes: Tensor, scale: Tensor, x: Tensor, scale_layout: str = "linear", rule: str = "RCEIL"
) -> None:
    """See `olq.activations.quantize_mxfp8`."""
    mxfp8.quantize_(x, codes, Places(scale, scale_layout, 0, 1, 0), rule=rule)


def _check_nvfp4(x: Tensor, scale_2: Tensor, scale_layout: str = "linear") -> None:
    name = "quantize_nvfp4"
    check_source(name, x, None)
    lead, _, _ = check_matrix(name, "x", x)
    check_dtype(name, "scale_2", scale_2, torch.float32)
    check_shape(name, "scale_2", scale_2, lead)
    check_same_device(name, x=x, scale_2=scale_2)
    _check_layout(name, scale_layout, SCALE_LAYOUTS)


def _fake_nvfp4(x: Tensor, scale_2: Tensor, scale_layout: str = "linear") -> _Pair:
    return _codes_like(x, -(-x.shape[-1] // 2)), _fake_blocks(x, scale_layout, NVFP4_BLOCK)


def _make_nvfp4(x: Tensor, scale_2: Tensor, scale_layout: str = "linear") -> _Pair:
    lead, rows, columns = _room(x)
    return alloc.fp4_output(
        rows,
        columns,
        scale_layout=scale_layout,  # pyright: ignore[reportArgumentType]  # checked already
        lead=lead,
        device=x.device,
        owner="quantize_nvfp4",
    )


@operator(
    'Tensor x, Tensor scale_2, str scale_layout="linear"',
    _check_nvfp4,
    fake=_fake_nvfp4,
    make=_make_nvfp4,
    kernel=True,
)
def quantize_nvfp4(
    codes: Tensor, scale: Tensor, x: Tensor, scale_2: Tensor, scale_layout: str = "linear"
) -> None:
    """See `olq.activations.quantize_nvfp4`."""
    nvfp4.quantize_(x, codes, Places(scale, scale_layout, 0, 1, 0), scale_2)


def _check_silu(
    gate: Tensor,
    up: Tensor,
    scale_layout: str = "ue8m0_words",
    group: int = 128,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> None:
    name = "silu_mul_quantize_fp8"
    _check_gate(name, gate, up, limit, alpha, beta, through)
    _check_group(name, group)
    _check_layout(name, scale_layout, GROUP_LAYOUTS)


def _fake_silu(
    gate: Tensor, up: Tensor, scale_layout: str = "ue8m0_words", group: int = 128, *rest: object
) -> _Pair:
    return _fake_groups(gate, scale_layout, group)


def _make_silu(
    gate: Tensor, up: Tensor, scale_layout: str = "ue8m0_words", group: int = 128, *rest: object
) -> _Pair:
    return _group_output(gate, scale_layout, group, "silu_mul_quantize_fp8")


@operator(
    f'Tensor gate, Tensor up, str scale_layout="ue8m0_words", {_SILU}',
    _check_silu,
    fake=_fake_silu,
    make=_make_silu,
    kernel=True,
)
def silu_mul_quantize_fp8(
    codes: Tensor,
    scale: Tensor,
    gate: Tensor,
    up: Tensor,
    scale_layout: str = "ue8m0_words",
    group: int = 128,
    power_of_two: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    through: torch.dtype | None = None,
) -> None:
    """See `olq.activations.silu_mul_quantize_fp8`."""
    activations.silu_mul_quantize_(
        gate,
        up,
        codes,
        scale,
        group,
        power_of_two=power_of_two,
        limit=limit,
        alpha=alpha,
        beta=beta,
        through=through,
    )
