"""Triton kernels behind the operators, and which path a call takes. Importing this loads no triton.

On CUDA tensors an operator first asks `replay`, or `renew` if it returns new tensors, which repeat a launch that was
made before for tensors like these; then, after its checks, `launch`; what neither takes goes to olq.numerics, a product
to bands of decoded rows. Nothing is decided in silence: `path` says of any call which way it goes and why, `table`
prints the rules.

plans      arguments to launches: which kernel, which tile, or the reason why there is none. Integers only
tiles      the sizes of tiles, tuned on an H200
launching  compile, launch, and launch again without Triton's Python
batch, tabled                    many calls that differ in addresses only, in one launch
rounding, memory                 device functions: arithmetic; reading and writing tiles
linear_decode                    device functions: codes to operands of a product, in registers
linear_weights                   device functions: a program's part of a quantized weight, read and decoded
plan_shares                      how programs divide a product, tuned on an H200
linear_small, linear_wide        the kernels that multiply some rows by a quantized weight
fp8, blockscaled, tensor, tensor_once, decode, activations, product    kernels
plan_dummy, dummy    dummy weights: no operator; olq.numerics.random asks `fill_uniform` where it is given it

No path waits for the GPU, so that a CUDA graph can hold each; compile before capturing, by one call outside it. One
kernel, `tensor_once`, needs many multiprocessors at the same time: see `allow_together`.
Bytes equal olq.numerics on every input. Kernels add no memory but a few KB for the maxima of a whole matrix, and, for
products of more than a few rows, float32 for the sums of shares: see `olq.kernels.linear_wide`. Products sum in float32
what codes and scales say, float32 scales after the sum: see olq.ops.linear.
"""

from dataclasses import dataclass

from torch import Tensor

from olq.kernels import launching, plans
from olq.kernels.launching import allow_together, launch, renew, replay, unavailable
from olq.kernels.launching import current_stream as current_stream
from olq.kernels.plan_dummy import fill_uniform

__all__ = ["Path", "allow_together", "fill_uniform", "launch", "path", "renew", "replay", "table"]


@dataclass(frozen=True, slots=True)
class Path:
    """Which way one call goes.

    Args:
        operator: its name, as in `torch.ops.olq`.
        kernels: of olq.kernels, in the order of their launches; empty for the reference.
        reason: why the reference; empty for kernels.
    """

    operator: str
    kernels: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        if self.kernels:
            return f"{self.operator}: {', then '.join(self.kernels)}"
        products = self.operator.startswith(("matmul_", "multiply_"))
        otherwise = "decoded bands and torch.mm" if products else "olq.numerics"
        return f"{self.operator}: {otherwise}, because {self.reason}"


def path(operator: str, *args: object) -> Path:
    """Say which way `torch.ops.olq.<operator>(*args)` goes, without going it.

    Args:
        operator: a name in `olq.ops`.
        args: the operator's arguments; before them the tensors that it returns, if it returns any, as olq.alloc
            makes them. Tensors are only looked at, never read.
    """
    reason = unavailable(args)
    plan = reason or plans.plan(operator, args)
    if isinstance(plan, str):
        return Path(operator, (), plan)
    plan = launching.suited(plan, next(a.device for a in args if isinstance(a, Tensor)), launching._allowed)
    return Path(operator, tuple(launch.kernel for launch in plan.launches), "")


def table() -> str:
    """The rules that `path` follows, a line each."""
    width, wide = (max(len(line[i]) for line in plans.TABLE) for i in (0, 1))
    return "\n".join(f"{name:{width}}  {case:{wide}}  {kernel}" for name, case, kernel in plans.TABLE)
