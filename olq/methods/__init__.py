"""The built-in methods. Importing this package fills the registry: the one import in olq with an effect."""

from olq.methods.base import Geometry, MethodParams, QuantMethod, Target, WeightPlan, format_tag
from olq.methods.fp8 import Fp8
from olq.methods.keep import Keep
from olq.methods.mxfp8 import Mxfp8
from olq.methods.nvfp4 import Nvfp4

__all__ = [
    "Fp8",
    "Geometry",
    "Keep",
    "MethodParams",
    "Mxfp8",
    "Nvfp4",
    "QuantMethod",
    "Target",
    "WeightPlan",
    "format_tag",
]
