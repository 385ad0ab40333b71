"""olq's operators, `torch.ops.olq.*`: schemas, shape rules and the device table. No arithmetic.

Most write into storage that their caller owns, so that a first load and a reload are the same code and
addresses survive. Codes, E8M0 and E4M3 bytes are uint8 here; typed views are made at kernels. A tensor is
[*lead, n, k], where `lead` are experts' dimensions, usually none; its strides may be any. `source` may be
on another device than results.

    quantize_fp8_(source, codes!, scale!, block_rows, block_columns, power_of_two, through, saturate)
    quantize_mxfp8_(source, codes!, scale!, rule, scale_layout, row, row_step, column, through, saturate)
    nvfp4_tensor_scale_(source, scale_2!, through, saturate)
    quantize_nvfp4_(source, codes!, scale!, scale_2, scale_layout, row, row_step, column, through, saturate)
    dequantize_fp8_(codes, scale, out!, block_rows, block_columns)
    dequantize_mxfp8_(codes, scale, out!, scale_layout, row, row_step, column)
    dequantize_nvfp4_(codes, scale, scale_2, out!, scale_layout, row, row_step, column)
    quantize_fp8_words_(source, codes!, words!, group)
    silu_mul_quantize_fp8_(gate, up, codes!, scale!, group, power_of_two, limit, alpha, beta, through)

Five make their outputs in olq.alloc, (codes, scale), for activations; olq.activations says what they do.

    quantize_fp8_token(x, power_of_two)
    quantize_fp8_group(x, scale_layout, group, power_of_two)
    quantize_mxfp8(x, scale_layout, rule)
    quantize_nvfp4(x, scale_2, scale_layout)
    silu_mul_quantize_fp8(gate, up, scale_layout, group, power_of_two, limit, alpha, beta, through)

Three multiply by a quantized weight, x @ W.T + bias, into a new tensor; olq.ops.linear says what each argument is.

    matmul_fp8(x, codes, scale, bias, parts, starts, block_rows, block_columns)
    matmul_mxfp8(x, codes, scale, bias, parts, starts, scale_layout)
    matmul_nvfp4(x, codes, scale, scale_2, bias, parts, starts, scale_layout)

One multiplies codes by codes, and one makes a product of values from one of codes: olq.ops.codes, olq.ops.product.

    multiply_codes_fp8_(x, x_scale, codes, scale, bias, parts, starts, block_rows, block_columns, out!)
    scale_product_(product, of_rows, of_columns, bias, out!)

Meaning of every argument: the function of the same name in olq.numerics and docs/formats/.
"""

from olq.ops.activations import (
    quantize_fp8_group,
    quantize_fp8_token,
    quantize_fp8_words_,
    quantize_mxfp8,
    quantize_nvfp4,
    silu_mul_quantize_fp8,
    silu_mul_quantize_fp8_,
)
from olq.ops.codes import multiply_codes_fp8_
from olq.ops.linear import matmul_fp8, matmul_mxfp8, matmul_nvfp4
from olq.ops.product import scale_product_
from olq.ops.weights import (
    dequantize_fp8_,
    dequantize_mxfp8_,
    dequantize_nvfp4_,
    nvfp4_tensor_scale_,
    quantize_fp8_,
    quantize_mxfp8_,
    quantize_nvfp4_,
)

__all__ = [
    "dequantize_fp8_",
    "dequantize_mxfp8_",
    "dequantize_nvfp4_",
    "matmul_fp8",
    "matmul_mxfp8",
    "matmul_nvfp4",
    "multiply_codes_fp8_",
    "nvfp4_tensor_scale_",
    "quantize_fp8_",
    "quantize_fp8_group",
    "quantize_fp8_token",
    "quantize_fp8_words_",
    "quantize_mxfp8",
    "quantize_mxfp8_",
    "quantize_nvfp4",
    "quantize_nvfp4_",
    "scale_product_",
    "silu_mul_quantize_fp8",
    "silu_mul_quantize_fp8_",
]
