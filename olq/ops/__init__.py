"""olq's operators, `torch.ops.olq.*`: schemas, shape rules and the device table. No arithmetic.

Each writes into storage that its caller owns, so that a first load and a reload are the same code and
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

Meaning of every argument: the function of the same name in olq.numerics and docs/formats/.
"""

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
    "nvfp4_tensor_scale_",
    "quantize_fp8_",
    "quantize_mxfp8_",
    "quantize_nvfp4_",
]
