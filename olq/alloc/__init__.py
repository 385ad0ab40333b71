"""Memory that kernels own: specs, the one allocator, the field's usual outputs, and the audit.

Spec      docs/memory.md
Elsewhere orders of bytes in olq.layout; what is written into them in olq.numerics and olq.kernels.
"""

from olq.alloc.memory import allocate, write_padding_
from olq.alloc.spec import TensorSpec

__all__ = [
    "TensorSpec",
    "allocate",
    "write_padding_",
]
