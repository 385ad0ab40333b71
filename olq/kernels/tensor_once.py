"""FP8 codes with one scale for a whole matrix in one launch, whose programs wait for each other. Imports triton.

Where `tensor` sweeps over a matrix in two launches, the programs of this one all run at the same time, one on each
multiprocessor (`Launch.together`). Each finds the largest magnitude of its part, says so, waits for the others, and
goes on with its part, of which it holds in registers what fits.

Letters   word = int32, two neighbouring elements of 16 bits; unit = UNIT words. Program p has the units p,
          p + PROGRAMS, p + 2 * PROGRAMS ...: HELD at least, the first ones, which stay in registers. The others are
          read again, the last first; the L2 cache is asked to keep them so long.
Ahead     AHEAD units are asked for before the AHEAD in front of them are used, so that reading never stops.
TAIL      there are words beyond the last whole unit; they are the first program's.
Slots     int32, one a program: EMPTY, or the largest magnitude that it found, which in 16-bit floats are bits that
          compare as integers, and less; NaN are the largest. One reduction says whether a slot is empty and what the
          largest magnitude is, of the same words, so nothing rests on the order in which others become visible, or on
          which thread read a word. `clear` empties them first: memory of a call may hold anything.
EARLY     `quantize_tensor` may start while `clear` runs; it waits before it touches memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from olq.kernels.memory import half
from olq.kernels.rounding import e4m3, fp8_scale

EMPTY = tl.constexpr(1 << 16)


@triton.jit
def clear(slots, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, HARDWARE: tl.constexpr, EARLY: tl.constexpr):
    """All slots empty. SLOTS: a power of two that holds them."""
    if EARLY:
        gdc_launch_dependents()
    at = tl.arange(0, SLOTS)
    tl.store(slots.to(tl.pointer_type(tl.int32)) + at, tl.full((SLOTS,), EMPTY, tl.int32), mask=at < PROGRAMS)


@triton.jit
def _larger(running, words, HARDWARE: tl.constexpr):
    """The larger magnitudes, of both halves of words."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; and.b32 a, $2, 0x7FFF7FFF; max.u16x2 $0, $1, a; }",
            "=r,r,r",
            [running, words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    words &= 0x7FFF7FFF
    high = tl.maximum(running >> 16, words >> 16)
    return (high << 16) | tl.maximum(running & 0xFFFF, words & 0xFFFF)


@triton.jit
def _largest(running, found, COUNT: tl.constexpr, HARDWARE: tl.constexpr):
    """The largest magnitudes, of COUNT units too."""
    for i in tl.static_range(COUNT):
        running = _larger(running, found[i], HARDWARE)
    return running


@triton.jit
def _largest_slot(slots, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr):
    """At least EMPTY while a slot is empty."""
    slot = tl.arange(0, SLOTS)
    return tl.max(tl.load(slots + slot, mask=slot < PROGRAMS, other=0, volatile=True), 0)


@triton.jit
def _less(a, b, COUNT: tl.constexpr):
    """Whether one number is less than another, [COUNT]: Triton's interpreter takes no mask without a shape."""
    return tl.zeros((COUNT,), tl.int32) + a < b


@triton.jit
def _ask(from_, unit, end, COUNT: tl.constexpr, APART: tl.constexpr, UNIT: tl.constexpr):
    """COUNT units from one on, upwards before `end`."""
    found = ()
    from_ += unit * APART
    for i in tl.static_range(COUNT):
        found = found + (
            tl.load(
                from_ + i * APART, mask=_less(unit + i, end, UNIT), other=0, eviction_policy="evict_last"
            ),
        )
    return found


@triton.jit
def _ask_back(from_, unit, COUNT: tl.constexpr, HELD: tl.constexpr, APART: tl.constexpr, UNIT: tl.constexpr):
    """COUNT units from one on, downwards to those that are held. Nobody reads them once more."""
    found = ()
    from_ += unit * APART
    for i in tl.static_range(COUNT):
        at = from_ - i * APART
        found = found + (
            tl.load(at, mask=_less(HELD - 1, unit - i, UNIT), other=0, eviction_policy="evict_first"),
        )
    return found


@triton.jit
def _encoded(words, factor, BFLOAT16: tl.constexpr, UNIT: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of a unit, uint8 [2 * UNIT], of finite elements."""
    even, odd = half(words, False, BFLOAT16), half(words, True, BFLOAT16)
    return e4m3(tl.reshape(tl.join(even * factor, odd * factor), (2 * UNIT,)), HARDWARE)


@triton.jit
def _put_back(
    to, found, unit, factor, COUNT: tl.constexpr, HELD: tl.constexpr, APART: tl.constexpr, BFLOAT16: tl.constexpr,
    UNIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes of what `_ask_back` brought."""
    to += unit * (2 * APART)
    for i in tl.static_range(COUNT):
        codes = _encoded(found[i], factor, BFLOAT16, UNIT, HARDWARE)
        tl.store(to - i * (2 * APART), codes, mask=_less(HELD - 1, unit - i, 2 * UNIT))


@triton.jit
def quantize_tensor(
    source,
    codes,
    scale,
    slots,
    elements,
    POWER: tl.constexpr,
    BFLOAT16: tl.constexpr,
    UNIT: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
    TAIL: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Codes and scale of `elements`, an even number, that lie one after the other; BFLOAT16, or float16."""
    if EARLY:
        gdc_wait()
    APART: tl.constexpr = PROGRAMS * UNIT
    program = tl.program_id(0)
    slots = slots.to(tl.pointer_type(tl.int32))
    start = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    units = elements // (2 * UNIT)
    mine = (units - program + PROGRAMS - 1) // PROGRAMS
    from_ = start + program * UNIT + tl.arange(0, UNIT)
    to = codes + program * (2 * UNIT) + tl.arange(0, 2 * UNIT)

    held = ()
    for i in tl.static_range(HELD):
        held = held + (tl.load(from_ + i * APART, eviction_policy="evict_first"),)
    running = tl.zeros((UNIT,), tl.int32)
    if TAIL:
        end = tl.where(program == 0, elements, 0)
        tail = units * UNIT + tl.arange(0, UNIT)
        last = tl.load(start + tail, mask=tail * 2 < end, other=0)
        tail_to = units * (2 * UNIT) + tl.arange(0, 2 * UNIT)
        running = _larger(running, last, HARDWARE)
    # Two groups take turns: what is asked for need not be moved, which would wait for it.
    a = _ask(from_, HELD, mine, AHEAD, APART, UNIT)
    at = tl.cast(HELD + AHEAD, tl.int32)
    while at < mine:
        b = _ask(from_, at, mine, AHEAD, APART, UNIT)
        running = _largest(running, a, AHEAD, HARDWARE)
        a = _ask(from_, at + AHEAD, mine, AHEAD, APART, UNIT)
        running = _largest(running, b, AHEAD, HARDWARE)
        at += 2 * AHEAD
    running = _largest(running, a, AHEAD, HARDWARE)
    running = _largest(running, held, HELD, HARDWARE)
    at = mine - 1
    a = _ask_back(from_, at, AHEAD, HELD, APART, UNIT)  # while the others are waited for

    magnitude = tl.max(tl.maximum(running & 0xFFFF, running >> 16), 0)
    tl.atomic_xchg(slots + program, magnitude, sem="relaxed")
    magnitude = _largest_slot(slots, PROGRAMS, SLOTS)
    while magnitude >= EMPTY:
        magnitude = _largest_slot(slots, PROGRAMS, SLOTS)
    amax = half(magnitude + tl.zeros((1,), tl.int32), False, BFLOAT16)
    unit_scale, factor = fp8_scale(amax, POWER, HARDWARE)
    if program == 0:
        tl.store(scale + tl.arange(0, 1), unit_scale)

    if magnitude < (0x7F80 if BFLOAT16 else 0x7C00):
        while at >= HELD:
            b = _ask_back(from_, at - AHEAD, AHEAD, HELD, APART, UNIT)
            _put_back(to, a, at, factor, AHEAD, HELD, APART, BFLOAT16, UNIT, HARDWARE)
            a = _ask_back(from_, at - 2 * AHEAD, AHEAD, HELD, APART, UNIT)
            _put_back(to, b, at - AHEAD, factor, AHEAD, HELD, APART, BFLOAT16, UNIT, HARDWARE)
            at -= 2 * AHEAD
        for i in tl.static_range(HELD):
            tl.store(to + i * (2 * APART), _encoded(held[i], factor, BFLOAT16, UNIT, HARDWARE))
        if TAIL:
            tl.store(codes + tail_to, _encoded(last, factor, BFLOAT16, UNIT, HARDWARE), mask=tail_to < end)
    else:  # not finite: codes 0
        zeros = tl.zeros((2 * UNIT,), tl.uint8)
        while at >= 0:
            tl.store(to + at * (2 * APART), zeros)
            at -= 1
        if TAIL:
            tl.store(codes + tail_to, zeros, mask=tail_to < end)
