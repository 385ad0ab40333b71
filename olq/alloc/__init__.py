"""Memory that kernels own: specs, the one allocator, the field's usual outputs, and the audit.

Spec      docs/memory.md
Elsewhere orders of bytes in olq.layout; what is written into them in olq.numerics and olq.kernels.
"""

from olq.alloc.auditing import Audit, abandon, audit
from olq.alloc.findings import Finding
from olq.alloc.memory import allocate, write_padding_
from olq.alloc.outputs import (
    CodesAndScale,
    attention_output,
    block_scale_spec,
    fp4_output,
    fp8_group_output,
    fp8_token_output,
    mxfp8_output,
    overwritten_output,
)
from olq.alloc.spec import TensorSpec
from olq.alloc.twice import run_audited

__all__ = [
    "Audit",
    "CodesAndScale",
    "Finding",
    "TensorSpec",
    "abandon",
    "allocate",
    "attention_output",
    "audit",
    "block_scale_spec",
    "fp4_output",
    "fp8_group_output",
    "fp8_token_output",
    "mxfp8_output",
    "overwritten_output",
    "run_audited",
    "write_padding_",
]
