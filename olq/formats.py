"""Number formats and scale rules as frozen data: what every code means, and how a scale is chosen.

Element    E4M3 (fp8, mxfp8), E2M1 (nvfp4): sign, exponent, mantissa; ties to even; saturating.
Scale      float32 (fp8, and one a tensor for nvfp4), E8M0 (mxfp8), E4M3 (nvfp4 blocks).
Direction  every scale here is a decode scale: value = code * scale. One of the other kind says `encode`.
Spec       docs/formats/fp8.md, mxfp8.md, nvfp4.md. Arithmetic on tensors is in olq.numerics; nothing here
           needs torch.
"""

import math
import struct
from dataclasses import dataclass

from olq.errors import SourceError, UnknownNameError

FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite float32, 0x7F7FFFFF."""


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A sign-exponent-mantissa format of at most eight bits; subnormals, no infinity.

    Args:
        name: as papers and hardware spell it.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        bias: of the exponent field.
        max: largest finite value.
        max_code: code of `max`; the code of its negative has the sign bit set as well.
        nan_codes: codes that are no number; empty for a format without NaN.
        storage_bits: bits that one code takes in memory (4 for packed nibbles).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    nan_codes: tuple[int, ...]
    storage_bits: int

    @property
    def bits(self) -> int:
        """Width of a code: sign, exponent, mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def min_normal(self) -> float:
        """Least positive value with an implicit leading one."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Least positive value: the step below `min_normal`."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    def value(self, code: int) -> float:
        """What a code stands for, exactly. NaN codes give NaN; -0.0 keeps its sign.

        Raises:
            SourceError: the code is not in 0 .. 2**bits - 1.
        """
        if not 0 <= code < 1 << self.bits:
            raise SourceError(
                f"{self.name} has no such code.",
                where="a code to be decoded",
                found=str(code),
                need=f"0 to {(1 << self.bits) - 1}",
                remedy="mask the byte, or unpack it first",
            )
        if code in self.nan_codes:
            return math.nan
        sign = -1.0 if code & self.sign_mask else 1.0
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        if exponent == 0:
            return sign * mantissa * self.min_subnormal
        significand = 1.0 + mantissa / (1 << self.mantissa_bits)
        return sign * math.ldexp(significand, exponent - self.bias)


E4M3 = ElementFormat(
    name="E4M3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    max_code=0x7E,
    nan_codes=(0x7F, 0xFF),
    storage_bits=8,
)
"""The 'fn' variant: no infinity, one NaN of each sign."""

E2M1 = ElementFormat(
    name="E2M1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, max_code=0x7, nan_codes=(), storage_bits=4
)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; neither infinity nor NaN."""

FORMATS = {format.name: format for format in (E4M3, E2M1)}

E8M0_BIAS = 127
E8M0_MAX = 254
E8M0_NAN = 255


def e8m0_value(byte: int) -> float:
    """2 ** (byte - 127) for 0 .. 254, NaN for 255. Byte 0 is 2 ** -127, which is subnormal in float32."""
    return math.nan if byte == E8M0_NAN else math.ldexp(1.0, byte - E8M0_BIAS)


@dataclass(frozen=True, slots=True)
class ExponentRule:
    """How a power-of-two decode scale follows from the largest magnitude of its block.

    amax = m * 2**e with 1 <= m < 2. With base = e - 8 (448 = 1.75 * 2**8) the scale is 2 ** (base + 1) if
    the 23 bits of m after the point, read as an integer, exceed `last_without_bump`, else 2 ** base; then
    cut to what the scale's format can hold. Comparing integers is exact; a rounded log2 is not.

    Args:
        name: the word in a config.
        last_without_bump: largest mantissa field, 0 .. 0x7FFFFF, that keeps the exponent.
        saturates: True if elements near amax can exceed 448 and are clamped.
        meaning: one line for docs and messages.
    """

    name: str
    last_without_bump: int
    saturates: bool
    meaning: str

    @property
    def carry(self) -> int:
        """Added to a float32's bits, makes the exponent field go up exactly when the rule says so."""
        return 0x7FFFFF - self.last_without_bump


RCEIL = ExponentRule("RCEIL", 0x600000, False, "least exponent at which nothing saturates: up if m > 1.75")
FLOOR = ExponentRule("FLOOR", 0x7FFFFF, True, "floor(log2(amax)) - 8: never up; m > 1.75 saturates")
CEIL = ExponentRule("CEIL", 0x000000, False, "ceil(log2(amax)) - 8: up if m > 1")
EVEN = ExponentRule("EVEN", 0x77FFFF, True, "amax rounded to three mantissa bits first: up if m >= 1.9375")

EXPONENT_RULES = {rule.name: rule for rule in (RCEIL, FLOOR, CEIL, EVEN)}
DEFAULT_EXPONENT_RULE = RCEIL.name

FP8_SCALES = ("float32", "power_of_two")
"""float32: amax / 448. power_of_two: the scale of rule RCEIL, so that multiplying by it is exact."""

FP8_MIN_SCALE = 2.0**-126
"""Floor of an fp8 decode scale: the least normal float32, so that its reciprocal 2**126 is finite."""

FP8_ZERO_SCALE = 1.0
"""Decode scale of a unit that holds only zeros, and the padding of float32 scales."""

MXFP8_BLOCK = 32
"""Elements along K that share one E8M0 byte."""

NVFP4_BLOCK = 16
"""Elements along K that share one E4M3 byte."""

NVFP4_TENSOR_RANGE = 2688.0
"""6 * 448: the largest value that codes and block scales reach together, before the tensor scale."""

NVFP4_MIN_TENSOR_SCALE = 2.0**-117
"""Floor of `weight_scale_2`: times the least block scale, 2**-9, it is still normal and has a finite
reciprocal."""

SCALE_LAYOUTS = ("linear", "swizzled_128x4")
"""How block scales lie in memory: row by row, or in 128x4 tiles (docs/formats/layouts.md)."""


def exponent_rule(name: str) -> ExponentRule:
    """The rule called `name`.

    Raises:
        UnknownNameError: no rule has that name.
    """
    if name not in EXPONENT_RULES:
        raise UnknownNameError(
            "No scale rule has this name.",
            where="the rule of a power-of-two scale",
            found=repr(name),
            need=f"one of {', '.join(EXPONENT_RULES)}",
            remedy=f"leave it out for {DEFAULT_EXPONENT_RULE}; names are upper case",
        )
    return EXPONENT_RULES[name]


def _float32(value: float) -> float:
    """Round to float32, ties to even; infinite beyond its range."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def nvfp4_decode_from_encode(weight_global_scale: float) -> float:
    """Encode convention to decode convention: `weight_scale_2` = fl32(1 / `weight_global_scale`).

    One IEEE float32 division. Not invertible: about 28 % of the values do not come back through
    `nvfp4_encode_from_decode`, so convert once, keep the result and forget the other.

    Args:
        weight_global_scale: 2688 / amax, as compressed-tensors stores it. Finite, positive, a float32.

    Raises:
        SourceError: it is zero, negative or not finite: such a tensor has no decode scale.
    """
    return _reciprocal(weight_global_scale, "weight_global_scale")


def nvfp4_encode_from_decode(weight_scale_2: float) -> float:
    """Decode convention to encode convention: `weight_global_scale` = fl32(1 / `weight_scale_2`).

    Args:
        weight_scale_2: amax / 2688, as ModelOpt stores it and as olq holds it. Finite, positive, a float32.

    Raises:
        SourceError: it is zero, negative or not finite.
    """
    return _reciprocal(weight_scale_2, "weight_scale_2")


def _reciprocal(scale: float, name: str) -> float:
    rounded = _float32(scale)
    # The quotient of two float32 in float64, rounded once more, equals one float32 division (53 >= 2 * 24 +
    # 2).
    result = _float32(1.0 / rounded) if 0.0 < rounded < math.inf else math.nan
    if not 0.0 < result < math.inf:
        raise SourceError(
            "This scale has no reciprocal in float32.",
            where=name,
            found=repr(scale),
            need="a positive finite float32 whose reciprocal is one, too",
            remedy="read the other convention's tensor, or quantize the weight again",
        )
    return result
