"""The table of paths: for which device, method, dtype and M each holds, what else it needs, and what it runs.

The first row that holds for a call is taken. A row that is not `default` is taken only where the method's parameter
`path` names it: it has not run on such a device, or was not faster there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from olq.forward import matmul, reference, scaled_blocks, scaled_fp8
from olq.forward.facts import Input, Weight
from olq.kernels.plan_shares import row_limit

Run = Callable[[Weight, Tensor, Tensor | None], Tensor]
Values = tuple[tuple[str, tuple[str, ...]], ...]
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
NUMBERS = (*FLOATS, torch.float64)


@dataclass(frozen=True, slots=True)
class Need:
    """A condition that no column of the table has.

    Args:
        name: a word for it in the table.
        text: the condition.
        found: what is there instead, or None where the condition holds.
    """

    name: str
    text: str
    found: Callable[[Weight, Input], str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Args:
        path: its name, as the parameter `path` has it.
        methods: names of methods; empty for all, those of other packages included.
        values: parameters of the method, each with the values for which the row holds.
        device: type of the device; "any".
        least, below: compute capability, from `least` up to but not including `below`; None is no limit.
        dtypes: of x.
        tokens: least and largest M; None is no limit.
        default: whether it is taken without being asked for.
        needs: what else has to hold.
        run: (weight, x [..., K], bias) to [..., N].
        how: what it runs, in words.
    """

    path: str
    methods: tuple[str, ...]
    values: Values
    device: str
    least: tuple[int, int] | None
    below: tuple[int, int] | None
    dtypes: tuple[torch.dtype, ...]
    tokens: tuple[int, int | None]
    default: bool
    needs: tuple[Need, ...]
    run: Run
    how: str

    def concerns(self, method: str, params: object) -> bool:
        """Whether the row is about such a method at all."""
        if self.methods and method not in self.methods:
            return False
        for name, values in self.values:
            default = "none" if name == "activations" else None
            if getattr(params, name, default) not in values:
                return False
        return True

    def lacks(self, weight: Weight, given: Input) -> str | None:
        """What the row needs and does not find, or None if it holds."""
        if self.device not in ("any", given.device.type):
            return f"needs {self.where}; the weight is on {given.device}"
        if (self.least and given.capability < self.least) or (self.below and given.capability >= self.below):
            return f"needs {self.where}; this GPU has {number(given.capability)}"
        if given.dtype not in self.dtypes:
            return f"needs x in {names(self.dtypes)}; it is {name(given.dtype)}"
        least, most = self.tokens
        if given.tokens < least or (most is not None and given.tokens > most):
            return f"needs M {self.range}; it is {given.tokens}"
        for need in self.needs:
            found = need.found(weight, given)
            if found is not None:
                return f"needs {need.text}; found {found}"
        return None

    @property
    def where(self) -> str:
        """Device and compute capability, in words."""
        if self.least is None:
            return self.device
        above = f"{number(self.least)} and later" if self.below is None else ""
        between = f"{number(self.least)} to below {number(self.below)}" if self.below else ""
        return f"{self.device} {above}{between}"

    @property
    def what(self) -> str:
        """Methods and parameters, in words."""
        values = ", ".join(f"{key}={'|'.join(allowed)}" for key, allowed in self.values)
        return f"{', '.join(self.methods) or 'any'}: {values}"

    @property
    def range(self) -> str:
        """Of M, in words."""
        least, most = self.tokens
        return ("any" if not least else f"from {least}") if most is None else f"{least} to {most}"


def number(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it."""
    return f"{capability[0]}.{capability[1]}"


def name(dtype: torch.dtype) -> str:
    """A dtype without the module."""
    return str(dtype).removeprefix("torch.")


def names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes, in words."""
    return ", ".join(name(dtype) for dtype in dtypes)


# -- what else a row may need -------------------------------------------------------------------------------


def _gradient(weight: Weight, given: Input) -> str | None:
    return given.gradient


def _autocast(weight: Weight, given: Input) -> str | None:
    return "torch.autocast, which F.linear follows" if given.autocast else None


def _bias(weight: Weight, given: Input) -> str | None:
    return None if given.bias in (None, given.dtype) else f"a bias in {name(given.bias)}"


def _elements(weight: Weight, given: Input) -> str | None:
    return None if weight.rows and weight.columns else f"a weight of {weight.rows}x{weight.columns}"


def _nvidia(weight: Weight, given: Input) -> str | None:
    return "a ROCm build" if torch.version.hip else None


def _blas(weight: Weight, given: Input) -> str | None:
    version = torch.version.cuda or "none"
    enough = tuple(int(part) for part in version.split(".")[:2]) >= (12, 9) if version != "none" else False
    return None if enough else f"torch for CUDA {version}"


def _cpu_release(weight: Weight, given: Input) -> str | None:
    enough = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    return None if enough else f"torch {torch.__version__}"


def _swizzled(weight: Weight, given: Input) -> str | None:
    layout = weight.params.scale_layout
    return None if layout == scaled_blocks.LAYOUT else f"scale_layout={layout}"


def _one_part(weight: Weight, given: Input) -> str | None:
    parts = len(weight.tensors["_scale_2"])
    return None if parts == 1 else f"{parts} scales; scale_sharing=common gives one"


GRADIENT = Need("gradient", "no gradient", _gradient)
AUTOCAST = Need("autocast", "no autocast", _autocast)
BIAS = Need("bias", "a bias in the dtype of x", _bias)
ELEMENTS = Need("size", "N and K that are not 0", _elements)
NVIDIA = Need("nvidia", "CUDA, not ROCm", _nvidia)
BLAS = Need("cublas", "a torch for CUDA 12.9 or later", _blas)
CPU_RELEASE = Need("release", "torch 2.13 or later", _cpu_release)
SWIZZLED = Need("layout", "scale_layout=swizzled_128x4", _swizzled)
ONE_SCALE = Need("one scale", "one tensor scale", _one_part)

NEEDS = (GRADIENT, AUTOCAST, BIAS, ELEMENTS, NVIDIA, BLAS, CPU_RELEASE, SWIZZLED, ONE_SCALE)

_NONE: Values = (("activations", ("none",)),)
_ROWS: Values = (("granularity", ("tensor", "channel")), ("activations", ("tensor", "token")))
_BLOCKS: Values = (("granularity", ("block",)), ("activations", ("group",)))
_ALL: Values = (("activations", ("tensor", "token", "group")),)
_GROUP: Values = (("activations", ("group",)),)
_FP8 = (NVIDIA, GRADIENT, BIAS, ELEMENTS)
_OURS = ("fp8", "mxfp8", "nvfp4")
_FEW_HOW = (
    f"16-bit x on CUDA, M up to {row_limit('fp8 codes')}, not one scale each: multiply_codes_fp8_; else"
)
_CPU_HOW = "scaled_mm: TensorWise, or RowWise"
_ROWS_HOW = f"{_FEW_HOW} {_CPU_HOW}"
_MATMUL_HOW = "torch.ops.olq.matmul_*"

TABLE = (
    Row(
        "matmul", _OURS, _NONE, "cuda", None, None, FLOATS, (0, None), True,
        (GRADIENT, AUTOCAST, BIAS), matmul.weight_only, _MATMUL_HOW,
    ),
    Row(
        "matmul", _OURS, _NONE, "cpu", None, None, FLOATS, (0, None), False,
        (GRADIENT, AUTOCAST, BIAS), matmul.weight_only, _MATMUL_HOW,
    ),
    Row(
        "scaled_mm", ("fp8",), _ROWS, "cuda", (9, 0), (10, 0), FLOATS, (0, None), True,
        _FP8, scaled_fp8.path, _ROWS_HOW,
    ),
    Row(
        "scaled_mm", ("fp8",), _ROWS, "cuda", (8, 9), None, (torch.bfloat16,), (0, None), False,
        _FP8, scaled_fp8.path, f"{_ROWS_HOW}; not run there",
    ),
    Row(
        "scaled_mm", ("fp8",), _ROWS, "cpu", None, None, FLOATS, (0, None), False,
        (CPU_RELEASE, GRADIENT, BIAS, ELEMENTS), scaled_fp8.path, _CPU_HOW,
    ),
    Row(
        "scaled_mm", ("fp8",), _BLOCKS, "cuda", (9, 0), (10, 0), FLOATS, (0, None), True,
        (BLAS, *_FP8), scaled_fp8.path, f"{_FEW_HOW} scaled_mm: BlockWise1x128, 128x128",
    ),
    Row(
        "scaled_mm", ("mxfp8",), _GROUP, "cuda", (10, 0), None, (torch.bfloat16,), (0, None), False,
        (SWIZZLED, *_FP8), scaled_blocks.path, "scaled_mm: BlockWise1x32; not run there",
    ),
    Row(
        "scaled_mm", ("nvfp4",), _GROUP, "cuda", (10, 0), None, (torch.bfloat16,), (0, None), False,
        (SWIZZLED, ONE_SCALE, *_FP8), scaled_blocks.path, "scaled_mm: BlockWise1x16; not run there",
    ),
    Row(
        "reference", (), _NONE, "any", None, None, NUMBERS, (0, None), True,
        (), reference.weight_only, "bands of W are decoded",
    ),
    Row(
        "reference", _OURS, _ALL, "any", None, None, NUMBERS, (0, None), True,
        (GRADIENT,), reference.quantized, "Q(x) and bands of W are decoded, in float32",
    ),
)  # fmt: skip
"""In the order in which they are asked."""
