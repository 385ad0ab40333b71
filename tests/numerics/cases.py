"""Inputs and comparisons that the tests of this folder share.

A weight is a torch tensor; the oracles get its NumPy twin. Outputs of operators start as poison, so that a
byte that nobody wrote shows; equality is on bytes.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import olq.ops  # noqa: F401  (registers the operators)
from oracles import fp8, mxfp8, nvfp4, source

POISON = 0xA5
OPS = torch.ops.olq
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
FP8_BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128)}
RULES = ("RCEIL", "FLOOR", "CEIL", "EVEN")
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", None: None}


def poison(*shape: int, dtype: torch.dtype = torch.uint8, on: Tensor | None = None) -> Tensor:
    """Memory whose every byte is 0xA5, on the device of `on` or the CPU."""
    device = "cpu" if on is None else on.device
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.full((*shape, size), POISON, dtype=torch.uint8, device=device)
    return raw.view(dtype).squeeze(-1) if size > 1 else raw.squeeze(-1)


def numpy_of(w: Tensor) -> np.ndarray:
    """The same values in NumPy, in the same type."""
    w = w.detach().cpu().contiguous()
    if w.dtype == torch.bfloat16:
        return w.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return w.numpy()


def bytes_of(a: np.ndarray | Tensor) -> np.ndarray:
    """As unsigned bytes, last dimension widened."""
    a = numpy_of(a) if isinstance(a, Tensor) else a
    return np.atleast_1d(np.ascontiguousarray(a)).view(np.uint8)


def first_difference(got: np.ndarray | Tensor, want: np.ndarray | Tensor) -> str | None:
    """None if the bytes are equal; else how many differ, and where the first is with both values."""
    g, w = bytes_of(got), bytes_of(want)
    if g.shape != w.shape:
        return f"shape {g.shape}, not {w.shape}"
    wrong = np.argwhere(g != w)
    if not len(wrong):
        return None
    at = tuple(int(i) for i in wrong[0])
    return f"{len(wrong)} of {g.size} bytes differ, first at {at}: {g[at]:#04x}, not {w[at]:#04x}"


def assert_bytes_equal(got: np.ndarray | Tensor, want: np.ndarray | Tensor, what: str) -> None:
    difference = first_difference(got, want)
    assert difference is None, f"{what}: {difference}"


# -- operators on whole matrices, outputs poisoned
# --------------------------------------------------------------


def run_fp8(w, block, power_of_two=False, through=None, saturate=False):
    """Codes and scales by the operator, [*lead, n, k]."""
    grid = [-(-extent // b) if b else 1 for extent, b in zip(w.shape[-2:], block, strict=True)]
    codes, scale = poison(*w.shape, on=w), poison(*w.shape[:-2], *grid, dtype=torch.float32, on=w)
    OPS.quantize_fp8_(w, codes, scale, *block, power_of_two, through, saturate)
    return codes, scale


def run_mxfp8(w, rule="RCEIL", through=None, saturate=False):
    """Codes and row-major scale bytes by the operator."""
    *lead, n, k = w.shape
    codes, scale = poison(*w.shape, on=w), poison(*lead, n, -(-k // 32), on=w)
    OPS.quantize_mxfp8_(w, codes, scale, rule, "linear", 0, 1, 0, through, saturate)
    return codes, scale


def run_nvfp4(w, through=None, saturate=False, scale_2=None):
    """Packed codes, row-major scale bytes and tensor scales by the operators."""
    *lead, n, k = w.shape
    codes, scale = poison(*lead, n, -(-k // 2), on=w), poison(*lead, n, -(-k // 16), on=w)
    if scale_2 is None:
        scale_2 = poison(*lead, dtype=torch.float32, on=w)
        OPS.nvfp4_tensor_scale_(w, scale_2, through, saturate)
    OPS.quantize_nvfp4_(w, codes, scale, scale_2, "linear", 0, 1, 0, through, saturate)
    return codes, scale, scale_2


# -- the same by the oracles
# ------------------------------------------------------------------------------------


def _each_matrix(w, through, saturate, one):
    x = source.read(numpy_of(w), NAMES[through], saturate)
    parts = [one(matrix) for matrix in x.reshape(-1, *x.shape[-2:])]
    return tuple(np.stack(part).reshape((*x.shape[:-2], *part[0].shape)) for part in zip(*parts, strict=True))


def want_fp8(w, block, power_of_two=False, through=None, saturate=False):
    return _each_matrix(w, through, saturate, lambda x: fp8.quantize(x, block, power_of_two))


def want_mxfp8(w, rule="RCEIL", through=None, saturate=False):
    return _each_matrix(w, through, saturate, lambda x: mxfp8.quantize(x, rule))


def want_nvfp4(w, through=None, saturate=False, scale_2=None):
    def one(x):
        s2 = nvfp4.tensor_scale(x) if scale_2 is None else np.float32(scale_2)
        return *nvfp4.quantize(x, s2), np.asarray(s2)

    return _each_matrix(w, through, saturate, one)


METHODS = {
    **{
        f"fp8-{name}-{'pow2' if power else 'f32'}": (
            lambda w, b=block, p=power, **o: run_fp8(w, b, p, **o),
            lambda w, b=block, p=power, **o: want_fp8(w, b, p, **o),
        )
        for name, block in FP8_BLOCKS.items()
        for power in (False, True)
    },
    **{
        f"mxfp8-{rule}": (
            lambda w, r=rule, **o: run_mxfp8(w, r, **o),
            lambda w, r=rule, **o: want_mxfp8(w, r, **o),
        )
        for rule in RULES
    },
    "nvfp4": (run_nvfp4, want_nvfp4),
}
"""name -> (by the operator, by the oracle); both take (weight, through=, saturate=)."""

WHAT = ("codes", "scales", "tensor scale")


def difference(name: str, w: Tensor, want=None, **options) -> str | None:
    """None if operator and oracle agree on every byte, else the first difference."""
    run, oracle = METHODS[name]
    want = oracle(w, **options) if want is None else want
    for what, g, o in zip(WHAT, run(w, **options), want, strict=False):
        found = first_difference(g, o)
        if found:
            return f"{name}, {what}: {found}"
    return None


def assert_equals_oracle(name: str, w: Tensor, want=None, **options) -> None:
    found = difference(name, w, want, **options)
    assert found is None, found


# -- inputs
# -----------------------------------------------------------------------------------------------------


def finite_bfloat16() -> Tensor:
    """All 65,280 of them."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[torch.isfinite(x)]


def largest_of_their_blocks(width: int) -> Tensor:
    """[65280, width]: each finite bfloat16 value, then its quarters, halves and itself negated, never
    larger."""
    x = finite_bfloat16()
    factors = torch.tensor([1.0, -0.5, 0.25, -1.0, 0.0, -0.75, 0.4375])
    return (x[:, None].float() * factors.repeat(width // 7 + 1)[:width]).bfloat16()


def ordinary_elements(width: int) -> Tensor:
    """[rows, width]: every finite bfloat16 value beside a larger one, up to 2 ** 20 times as large, or the
    largest.

    Runs of neighbouring values stand behind one element that sets the scale, so that each value meets
    scales that put it at the top, in the middle, among the subnormals and below the least code.
    """
    x = finite_bfloat16().float()
    x = torch.cat([x[x >= 0].sort().values, x[x <= 0].sort().values])
    x = torch.cat([x, x[: -len(x) % (width - 1)]]).view(-1, width - 1)
    top = x.abs().amax(-1, keepdim=True)
    rows = [
        torch.cat([(top * factor).bfloat16().float().clamp(max=3.38e38), x], 1)
        for factor in (1.0, 1.375, 30.0, 1000.0, 2.0**15, 2.0**20)
    ]
    return torch.cat(rows).bfloat16()


def near(values: np.ndarray, ulps: int = 2) -> np.ndarray:
    """Each float32 value and its neighbours within `ulps`."""
    bits = values.astype(np.float32).view(np.int32)
    moved = np.concatenate([bits + step for step in range(-ulps, ulps + 1)])
    return np.clip(moved, 0, 0x7F7FFFFF).astype(np.int32).view(np.float32)


KINDS = {
    "any": st.integers(0x0000_0000, 0x7F7F_FFFF),
    "zero": st.just(0),
    "subnormal": st.integers(1, 0x007F_FFFF),
    "around 448": st.integers(0x43DF_FFFC, 0x43E0_0004),
    "around 1.75": st.integers(0x3FDF_FFFC, 0x3FE0_0004),
    "weights": st.integers(0x3A00_0000, 0x3E00_0000),
    "huge": st.integers(0x7F00_0000, 0x7F7F_FFFF),
    "bfloat16": st.integers(0x0000, 0x7F7F).map(lambda high: high << 16),
}
"""Kinds of float32 bit pattern without its sign; a failing example names its kind."""


@st.composite
def weights(draw, n: int, k: int, dtypes=(torch.float32, torch.bfloat16, torch.float16)) -> Tensor:
    """[n, k], finite in float32; each run of 16 columns holds a few patterns of one kind."""
    bits = np.empty((n, k), np.uint32)
    for i in range(n):
        for j in range(0, k, 16):
            pattern = KINDS[draw(st.sampled_from(sorted(KINDS)))]
            few = draw(st.lists(st.tuples(pattern, st.booleans()), min_size=1, max_size=3))
            part = bits[i, j : j + 16]
            part[:] = np.resize(np.array([b | negative << 31 for b, negative in few], np.uint32), part.shape)
    return torch.from_numpy(bits.view(np.float32)).to(draw(st.sampled_from(dtypes)))
