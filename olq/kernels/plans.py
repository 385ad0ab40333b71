"""From an operator's arguments to kernel launches, or to the reason why there is no kernel. Integers only."""

from collections.abc import Callable, Sequence

from olq.kernels import plan_activations as activations
from olq.kernels import tiles
from olq.kernels.plan_blocks import nvfp4_tensor_scale, quantize_mxfp8, quantize_nvfp4
from olq.kernels.plan_decode import dequantize_fp8, dequantize_mxfp8, dequantize_nvfp4
from olq.kernels.plan_fp8 import quantize_fp8
from olq.kernels.plan_linear import matmul_fp8, matmul_mxfp8, matmul_nvfp4, multiply_codes_fp8
from olq.kernels.plan_product import scale_product
from olq.kernels.plan_shares import NARROW, row_limit
from olq.kernels.shapes import GRID, Plan

_PLANS: dict[str, Callable[..., Plan | str]] = {
    "quantize_fp8_": quantize_fp8,
    "quantize_mxfp8_": quantize_mxfp8,
    "nvfp4_tensor_scale_": nvfp4_tensor_scale,
    "quantize_nvfp4_": quantize_nvfp4,
    "dequantize_fp8_": dequantize_fp8,
    "dequantize_mxfp8_": dequantize_mxfp8,
    "dequantize_nvfp4_": dequantize_nvfp4,
    "matmul_fp8": matmul_fp8,
    "matmul_mxfp8": matmul_mxfp8,
    "matmul_nvfp4": matmul_nvfp4,
    "multiply_codes_fp8_": multiply_codes_fp8,
    "scale_product_": scale_product,
    "quantize_fp8_words_": activations.quantize_fp8_words,
    "silu_mul_quantize_fp8_": activations.silu_mul_quantize_fp8_into,
    "quantize_fp8_token": activations.quantize_fp8_token,
    "quantize_fp8_group": activations.quantize_fp8_group,
    "quantize_mxfp8": activations.quantize_mxfp8,
    "quantize_nvfp4": activations.quantize_nvfp4,
    "silu_mul_quantize_fp8": activations.silu_mul_quantize_fp8,
}

_LEAST, _MOST = (elements * 2 / (1 << 20) for elements in (tiles.LEAST_TOGETHER, tiles.LARGEST_TOGETHER))

TABLE = (
    ("quantize_fp8_", "unit 1 x k (channel, token)", "fp8.quantize_rows"),
    ("quantize_fp8_", "unit 1 x g, g a power of two from 16 to 4096", "fp8.quantize_groups"),
    ("quantize_fp8_", "unit of up to 16384 elements (128 x 128)", "fp8.quantize_blocks"),
    ("quantize_fp8_", "unit n x k (tensor)", "tensor.amax_partials, tensor.quantize_tensor"),
    (
        "quantize_fp8_",
        f"the same, one dense matrix, 16 bits, {_LEAST:.1f} to {_MOST:.0f} MiB, compute capability 9.0 or later, "
        f"{tiles.TOGETHER} multiprocessors or more, unless `allow_together` forbids it",
        "tensor_once.clear, tensor_once.quantize_tensor",
    ),
    ("quantize_fp8_", "any other unit", "olq.numerics"),
    ("quantize_mxfp8_", "any rule, linear or swizzled", "blockscaled.quantize_mxfp8"),
    ("nvfp4_tensor_scale_", "any", "tensor.amax_partials, tensor.nvfp4_scale"),
    ("quantize_nvfp4_", "linear or swizzled", "blockscaled.quantize_nvfp4"),
    ("dequantize_fp8_", "any unit", "decode.dequantize_fp8"),
    ("dequantize_mxfp8_", "linear or swizzled", "decode.dequantize_mxfp8"),
    ("dequantize_nvfp4_", "linear or swizzled", "decode.dequantize_nvfp4"),
    *(
        (f"matmul_{name.split()[0]}", f"up to {rows} rows of x, bfloat16 or float16, {case}", found)
        for name, case in (
            ("fp8", "scales of whole rows"),
            ("fp8 units", "scales of 64, 128, 192 ... columns"),
            ("mxfp8", "any layout"),
            ("nvfp4", "any layout"),
        )
        for rows, found in (
            (max(NARROW.get(name, {0: None})), "linear_small.product"),
            (row_limit(name), "linear_wide.product, linear_wide.add unless one share has all columns"),
        )
        if rows
    ),
    (
        "matmul_*",
        "more rows of x; float32; other scales; codes not 8-aligned; a bias with a stride; 64-bit sizes",
        "decode.*, then torch.mm, in bands of rows",
    ),
    (
        "multiply_codes_fp8_",
        f"up to {row_limit('fp8 codes')} rows of x, scales as for matmul_fp8, 16-bit result",
        "linear_small.product",
    ),
    ("multiply_codes_fp8_", "others", "decode.*, then torch.mm in float32"),
    ("quantize_fp8_words_", "any group", "activations.quantize_groups"),
    ("quantize_fp8_token", "any", "fp8.quantize_rows"),
    ("quantize_fp8_group", "row_major, groups as quantize_fp8_ has them", "as quantize_fp8_"),
    ("quantize_fp8_group", "any other layout or group", "activations.quantize_groups"),
    ("quantize_mxfp8", "linear or swizzled", "blockscaled.quantize_mxfp8"),
    ("quantize_nvfp4", "linear or swizzled", "blockscaled.quantize_nvfp4"),
    ("silu_mul_quantize_fp8_", "any layout and group", "activations.quantize_groups"),
    ("silu_mul_quantize_fp8", "any layout and group", "activations.quantize_groups"),
    ("scale_product_", "columns next to each other", "product.scale_product"),
    ("any", "no elements; tensors on two devices or on a CPU; no triton", "olq.numerics"),
    ("any", "leading dimensions that strides don't merge into one", "olq.numerics"),
)
"""(operator, case, kernels): what `plan` decides, in words; for sources of any strides and of every dtype."""


def plan(operator: str, args: Sequence[object]) -> Plan | str:
    """The launches for one call that has passed the operator's checks, or why there are none."""
    if operator not in _PLANS:
        return "no kernel is written for it"
    found = _PLANS[operator](*args)
    if isinstance(found, Plan) and any(one.grid[1] > GRID for one in found.launches):
        return f"a column is more than {GRID} units long"
    return found
