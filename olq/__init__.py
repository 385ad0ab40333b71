"""olq: quantize LLM weights to FP8, MXFP8 or NVFP4 while they are loaded, and reload them in place."""

from olq import activations as activations
from olq import alloc as alloc
from olq import errors as errors
from olq import forward as forward
from olq import ops as ops
from olq.config import QuantConfig as QuantConfig
from olq.config import Rule as Rule
from olq.methods.base import MethodParams as MethodParams
from olq.methods.base import QuantMethod as QuantMethod
from olq.registry import get_method as get_method
from olq.registry import method_names as method_names
from olq.registry import register_method as register_method
from olq.reload.api import dequantize as dequantize
from olq.reload.api import finalize_layerwise_processing as finalize_layerwise_processing
from olq.reload.api import initialize_layerwise_reload as initialize_layerwise_reload
from olq.reload.api import initialize_online_processing as initialize_online_processing
from olq.reload.api import load as load
from olq.reload.api import reload as reload
from olq.reload.api import session as session
from olq.reload.callbacks import on_commit as on_commit
from olq.reload.counter import CopyCounter as CopyCounter
from olq.reload.declarations import after_load as after_load
from olq.reload.declarations import derive as derive
from olq.reload.dummy import DummyReport as DummyReport
from olq.reload.dummy import dummy_init as dummy_init
from olq.reload.dummy import dummy_init_tensor as dummy_init_tensor
from olq.reload.dummy_rules import Shard as Shard
from olq.reload.fingerprint import Fingerprint as Fingerprint
from olq.reload.fingerprint import fingerprint as fingerprint
from olq.reload.names import materialize as materialize
from olq.reload.options import LoadOptions as LoadOptions
from olq.reload.options import Staging as Staging
from olq.reload.plans import forget_plans as forget_plans
from olq.reload.prepare import meta_parameters as meta_parameters
from olq.reload.prepare import prepare as prepare
from olq.reload.session import Session as Session
from olq.report import Report as Report
from olq.report import Status as Status
from olq.rules import Decision as Decision
from olq.rules import Resolver as Resolver

__version__ = "0.1.0"
