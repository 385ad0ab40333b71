"""Codes to nibbles, scales to MN-major columns and to packed UE8M0 words, and back: tensors, vectorised.

Letters   K = columns, MN = rows of the operand, G = scale groups, W = ceil(G / 4) words, A = MN up to a
          multiple of 4.
Spec      docs/formats/layouts.md; the maps themselves are in olq.layout
Elsewhere memory is made in olq.alloc, which also writes the padding of MN-major and word scales.

Every function takes `out` from its caller, or makes it. Bytes that `out` does not address are never touched.
"""

import torch
from torch import Tensor

from olq.alloc import TensorSpec, allocate
from olq.errors import LayoutError
from olq.layout import MNMajor, Order, UE8M0Words

_MANTISSA = 0x7FFFFF
_TWO_TO_MINUS_127 = 0x00400000  # float32 bits: subnormal, the one E8M0 value whose mantissa is not 0


def pack_nibbles(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Two 4-bit codes a byte: even columns in the low nibble, odd ones in the high nibble.

    Args:
        codes: [..., K], uint8, values 0..15 (higher bits are dropped), any strides.
        out: [..., ceil(K / 2)], uint8, any strides; each byte is written. With K odd, the last high nibble is
            0.

    Returns:
        `out`. Scratch: half a byte a code.

    Raises:
        LayoutError: a dtype or a shape does not fit.
    """
    K = _last(codes, torch.uint8, "pack_nibbles")
    out = _result(out, (*codes.shape[:-1], -(-K // 2)), torch.uint8, codes, "pack_nibbles")
    out.copy_(codes[..., ::2]).bitwise_and_(0xF)
    out[..., : K // 2].bitwise_or_(codes[..., 1::2] << 4)
    return out


def unpack_nibbles(packed: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
    """One 4-bit code a byte, the inverse of `pack_nibbles`.

    Args:
        packed: [..., ceil(K / 2)], uint8, any strides.
        columns: K.
        out: [..., K], uint8, any strides; each byte is written.

    Returns:
        `out`. Scratch: none.

    Raises:
        LayoutError: a dtype or a shape does not fit.
    """
    width = _last(packed, torch.uint8, "unpack_nibbles")
    if width != -(-columns // 2):
        raise _misfit("unpack_nibbles", packed, f"[..., {-(-columns // 2)}] uint8 for {columns} codes a row")
    out = _result(out, (*packed.shape[:-1], columns), torch.uint8, packed, "unpack_nibbles")
    out[..., ::2].copy_(packed).bitwise_and_(0xF)
    out[..., 1::2].copy_(packed[..., : columns // 2]).bitwise_right_shift_(4)
    return out


def to_mn_major(scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Float32 scales in MN-major order with 16-byte aligned columns.

    Args:
        scale: [*lead, MN, G], float32, any strides.
        out: the same shape, strides (..., A * G, 1, A). None makes it, padding rows included.

    Returns:
        `out`. Scratch: none.

    Raises:
        LayoutError: a dtype, a shape or strides don't fit.
    """
    MN, G = _pair(scale, torch.float32, "to_mn_major")
    return _ordered(out, MNMajor(MN, G), scale, torch.float32, "to_mn_major").copy_(scale)


def from_mn_major(scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Float32 scales in row-major order.

    Args:
        scale: [*lead, MN, G], float32, any strides: MN-major ones are told by their strides alone.
        out: the same shape, any strides. None makes it, contiguous.

    Returns:
        `out`. Scratch: none.
    """
    _pair(scale, torch.float32, "from_mn_major")
    return _result(out, tuple(scale.shape), torch.float32, scale, "from_mn_major").copy_(scale)


def to_ue8m0_words(
    scale: Tensor, out: Tensor | None = None, *, rows: int | None = None, block_rows: int = 1
) -> Tensor:
    """Exponents of power-of-two decode scales, four to an int32, words in MN-major order.

    Args:
        scale: [*lead, S, G]; float32 positive powers of two from 2**-127 to 2**127, or uint8 E8M0 bytes; any
            strides.
        out: [*lead, MN, W], int32, strides (..., A * W, 1, A). None makes it, padding rows included.
        rows: MN; None is S * block_rows.
        block_rows: rows that repeat one row of `scale`: 128 for the scales of 128x128 weight blocks.

    Returns:
        `out`; lanes after group G hold 0. Scratch: about 16 bytes a scale, and one read-back for the check.

    Raises:
        LayoutError: a scale is no positive power of two that E8M0 has, or a dtype, a shape or strides don't
            fit.
    """
    where = "to_ue8m0_words"
    S, G = _pair(scale, scale.dtype if scale.dtype == torch.uint8 else torch.float32, where)
    MN = S * block_rows if rows is None else rows
    if -(-MN // max(block_rows, 1)) != S:
        raise _misfit(
            where,
            scale,
            f"{-(-MN // max(block_rows, 1))} rows of scales for {MN} rows in blocks of {block_rows}",
        )
    exponents = _exponents(scale, where)
    # Fresh words seen as bytes, not bytes seen as words: torch refuses the latter for some empty shapes.
    words = torch.empty((*scale.shape[:-2], S, -(-G // 4)), dtype=torch.int32, device=scale.device)
    lanes = words.view(torch.uint8)
    lanes[..., :G] = exponents
    lanes[..., G:] = 0
    out = _ordered(out, UE8M0Words(MN, G), scale, torch.int32, where)
    if block_rows == 1:
        return out.copy_(words)
    whole = MN // block_rows
    out[..., : whole * block_rows, :].unflatten(-2, (whole, block_rows)).copy_(words[..., :whole, None, :])
    out[..., whole * block_rows :, :].copy_(words[..., whole:, :])
    return out


def from_ue8m0_words(words: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
    """Decode scales from packed exponents.

    Args:
        words: [*lead, MN, W], int32, any strides.
        columns: G.
        out: [*lead, MN, G], float32 decode scales or uint8 E8M0 bytes, any strides. None makes float32.

    Returns:
        `out`; exponent byte 0 is 2**-127, 255 is NaN. Scratch: about 16 bytes a scale.

    Raises:
        LayoutError: a dtype or a shape does not fit.
    """
    where = "from_ue8m0_words"
    MN, W = _pair(words, torch.int32, where)
    if -(-columns // 4) != W:
        raise _misfit(where, words, f"[..., {-(-columns // 4)}] int32 for {columns} groups")
    fresh = torch.empty(words.shape, dtype=torch.int32, device=words.device).copy_(words)
    exponents = fresh.view(torch.uint8)[..., :columns]
    dtype = torch.float32 if out is None else out.dtype
    shape = (*words.shape[:-2], MN, columns)
    out = _result(out, shape, torch.uint8 if dtype == torch.uint8 else torch.float32, words, where)
    return out.copy_(exponents if dtype == torch.uint8 else decode_e8m0(exponents))


def decode_e8m0(exponents: Tensor) -> Tensor:
    """Float32 decode scales of E8M0 bytes: 2**(b - 127), 2**-127 for 0, NaN for 255.

    Args:
        exponents: uint8, any shape.

    Returns:
        float32, same shape.
    """
    bits = exponents.to(torch.int32)
    bits = torch.where(bits == 0, _TWO_TO_MINUS_127, bits << 23)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)


def _exponents(scale: Tensor, where: str) -> Tensor:
    """E8M0 bytes of float32 powers of two, or the bytes themselves, checked."""
    if scale.dtype == torch.uint8:
        bad, exponents = scale == 255, scale
    else:
        bits = scale.contiguous().view(torch.int32)
        lowest = bits == _TWO_TO_MINUS_127
        normal = (bits & _MANTISSA == 0) & (bits > 0) & (bits < 0x7F800000)
        bad, exponents = ~(normal | lowest), torch.where(lowest, 0, bits >> 23).to(torch.uint8)
    if bad.any():
        at = bad.nonzero()[0].tolist()
        value = scale[tuple(at)].item()
        raise LayoutError(
            "A scale is not a positive power of two, so it has no exponent byte.",
            where=f"{where}, scale {at}",
            found=f"{value!r}; {int(bad.sum())} of {bad.numel()} scales are like that",
            need="2.0**n with -127 <= n <= 127" if scale.dtype != torch.uint8 else "bytes 0..254; 255 is NaN",
            remedy="quantize with power-of-two scales, or keep the scales in float32",
        )
    return exponents


def _ordered(out: Tensor | None, order: Order, like: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """`out`, checked against an order's shape and strides, or a new tensor in that order."""
    spec = TensorSpec.of(order, dtype, tuple(like.shape[:-2]))
    if out is None:
        return allocate(spec, device=like.device, owner=where)
    # The stride of a dimension of size 1 addresses nothing, and torch changes it freely.
    strides = [s for s, n in zip(out.stride(), out.shape, strict=True) if n > 1]
    need = [s for s, n in zip(spec.stride, spec.shape, strict=True) if n > 1]
    if tuple(out.shape) != spec.shape or out.dtype != dtype or strides != need:
        raise _misfit(where, out, f"{dtype}, shape {list(spec.shape)}, strides {list(spec.stride)}")
    return out


def _result(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, where: str
) -> Tensor:
    if out is None:
        return allocate(TensorSpec(shape, dtype), device=like.device, owner=where)
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise _misfit(where, out, f"{dtype}, shape {list(shape)}")
    return out


def _last(t: Tensor, dtype: torch.dtype, where: str) -> int:
    if t.dtype != dtype or t.dim() < 1:
        raise _misfit(where, t, f"{dtype}, at least one dimension")
    return t.shape[-1]


def _pair(t: Tensor, dtype: torch.dtype, where: str) -> tuple[int, int]:
    if t.dtype != dtype or t.dim() < 2:
        raise _misfit(where, t, f"{dtype}, [*lead, rows, groups]")
    return t.shape[-2], t.shape[-1]


def _misfit(where: str, t: Tensor, need: str) -> LayoutError:
    return LayoutError(
        "A tensor of codes or scales has the wrong form.",
        where=where,
        found=f"{t.dtype}, shape {list(t.shape)}, strides {list(t.stride())}",
        need=need,
        remedy="make outputs with olq.alloc.allocate; `.contiguous()` undoes MN-major strides",
    )
