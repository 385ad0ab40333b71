"""Device functions: read a tile of a weight in float32, find scale bytes, find the tensors of a batch. Imports triton.

A kernel that olq.kernels.batch launches takes its tensors from `table`, int64 [entries, WORDS]: addresses of one call a
row. TABLE is the matrices of an entry, so that the grid's third extent is entries times matrices; 0 without a table,
and then nothing of this is compiled. Bit i of ALIGNED: operand i of every entry is 16-byte aligned.
"""

import triton
import triton.language as tl

from olq.kernels import shapes

WORDS = tl.constexpr(shapes.WORDS)


@triton.jit
def entry_of(program, TABLE: tl.constexpr):
    """(Row of the table, matrix in it) of a program's third index; the matrix in 64 bits."""
    entry = program
    if TABLE:
        entry = program // TABLE
        program = program % TABLE
    return entry, program.to(tl.int64)


@triton.jit
def operand(pointer, table, entry, INDEX: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """`pointer`, or with a table the address in its row, as a pointer of the same type."""
    if TABLE:
        pointer = tl.load(table + entry * WORDS + INDEX).to(pointer.dtype)
        if ALIGNED >> INDEX & 1:
            pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def offsets(rows, columns, row_stride, column_stride, WIDE: tl.constexpr):
    """[R, C] offsets of a tile from its first element. WIDE: in 64 bits."""
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows[:, None] * row_stride + columns[None, :] * column_stride


@triton.jit
def widen(x, HARDWARE: tl.constexpr):
    """To float32. Two bfloat16 at a time: by itself the compiler takes an instruction more for each second one."""
    if HARDWARE and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    if x.dtype == tl.bfloat16:  # by integers: Triton's interpreter loses subnormals
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def half(words, HIGH: tl.constexpr, BFLOAT16: tl.constexpr):
    """One element of each word of two, in float32: int32 words of two bfloat16, or two float16."""
    if BFLOAT16:
        return ((words & -65536) if HIGH else (words << 16)).to(tl.float32, bitcast=True)
    return ((words >> 16) if HIGH else words).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def finish(x, THROUGH: tl.constexpr, LARGEST: tl.constexpr, HARDWARE: tl.constexpr):
    """What `olq.numerics.source` does: round to `through`, then make finite on request.

    Args:
        x: elements in the source's dtype.
        THROUGH: "" or the narrow dtype that elements are rounded to.
        LARGEST: 0, or what an infinity becomes.
        HARDWARE: see `olq.kernels.rounding`; Triton's interpreter cuts where it should round to bfloat16.
    """
    x = widen(x, HARDWARE)
    if THROUGH == "float16":
        x = x.to(tl.float16).to(tl.float32)
    if THROUGH == "bfloat16":
        if HARDWARE:
            x = x.to(tl.bfloat16).to(tl.float32)
        else:
            bits = x.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x != x, bits, rounded).to(tl.float32, bitcast=True)
    if LARGEST != 0.0:
        x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
    return x


@triton.jit
def read(
    pointers,
    mask,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
    LARGEST: tl.constexpr,
    HARDWARE: tl.constexpr,
    FLEETING: tl.constexpr = False,
):
    """A tile in float32, 0 where `mask` is false. FULL: the mask is true everywhere. FLEETING: the cache need not keep
    it.
    """
    EVICT: tl.constexpr = "evict_first" if FLEETING else ""
    if FULL:
        x = tl.load(pointers, eviction_policy=EVICT)
    else:
        x = tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    return finish(x, THROUGH, LARGEST, HARDWARE)


@triton.jit
def write(pointers, values, mask, FULL: tl.constexpr):
    """Store a tile where `mask` is true. FULL: everywhere."""
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def places(rows, columns, row, row_step, column, row_stride, column_stride, SWIZZLED: tl.constexpr):
    """[R, C] offsets of the scale bytes of block rows and columns.

    `row_stride` of swizzled places is the width of the padded scale tensor.
    """
    r = (row + rows * row_step)[:, None]
    c = (column + columns)[None, :]
    if SWIZZLED:
        tile = r // 128 * (row_stride // 4) + c // 4
        return tile.to(tl.int64) * 512 + (r % 32 * 16 + r % 128 // 32 * 4 + c % 4)
    return r.to(tl.int64) * row_stride + c.to(tl.int64) * column_stride
