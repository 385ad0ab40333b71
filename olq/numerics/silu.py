"""y = gate * sigmoid(alpha * gate) * (up + beta), by float32 steps of our own, so that its bytes are defined.

Libraries' exponentials differ from each other in the last bit, and from one device to the next. Here each step is
one IEEE float32 operation, rounded by itself (never a fused multiply-add), or exact:

    g = min(gate, limit), u = max(min(up, limit), -limit)         if there is a limit
    t = alpha * g, a = min(|t|, 87)
    k = a * LOG2_E, rounded to float32, then to an integer, ties to even
    s = (k * LN2_HIGH - a) + k * LN2_LOW                          the bracket is exact
    p = (((((C6 * s + C5) * s + C4) * s + C3) * s + 1/2) * s + 1) * s + 1
    e = p * 2 ** -k                                               exact: e = exp(-a)
    sigmoid = 1 / (1 + e) if t >= 0, e / (1 + e) if t < 0, 0 if t < -87
    y = (g * sigmoid) * (u + beta)                                beta 0 adds nothing

Spec      docs/formats/activations.md, with the bounds on the error
Elsewhere quantizing y in olq.numerics.activations.
"""

import torch
from torch import Tensor

LARGEST = 87.0
"""From here down the sigmoid is 0: beside a result below 2**-118 of no account, and e stays a normal float32."""

LOG2_E = float.fromhex("0x1.715476p+0")
LN2_HIGH = 355 / 512  # ten bits, so that k * LN2_HIGH is exact
LN2_LOW = float.fromhex("-0x1.bd0106p-13")
COEFFICIENTS = (
    float.fromhex("0x1.6b75dep-10"),
    float.fromhex("0x1.12307p-7"),
    float.fromhex("0x1.555682p-5"),
    float.fromhex("0x1.5554a2p-3"),
    0.5,
    1.0,
    1.0,
)
"""C6 .. C0: nearest to exp(s) in relative terms for |s| <= 0.347, the last three as they are in its series."""

BUFFERS = 6
"""Float32 buffers that `silu_mul` needs."""

_ROUND = 1.5 * 2**23  # neighbouring float32 are 1 apart here, and the low bits of the pattern count
_ROUND_BITS = 0x4B400000
_BIAS, _POINT = 127, 23


def silu_mul(
    gate: Tensor, up: Tensor, work: list[Tensor], *, limit: float | None, alpha: float, beta: float
) -> Tensor:
    """y of one box; see the module.

    Args:
        gate: a floating type, any strides, any device.
        up: like `gate`.
        work: `BUFFERS` contiguous float32 tensors of that shape, overwritten.
        limit: None, or positive: `gate` is cut above, `up` on both sides.
        alpha: finite; rounded to float32, like the other two.
        beta: finite.

    Returns:
        y, float32, one of `work`. NaN where either is NaN (cutting keeps it) or gate is -inf; where a value
        that is not cut is infinite, or the product is too large: infinite or NaN.
    """
    g, u, t, *rest = work
    g.copy_(gate)
    u.copy_(up)
    if limit is not None:
        g.clamp_(max=limit)
        u.clamp_(-limit, limit)
    torch.mul(g, alpha, out=t)
    gone, positive = t < -LARGEST, t >= 0
    e = exp_of_minus(t.abs_().clamp_(max=LARGEST), rest)
    sum_ = torch.add(e, 1.0, out=t)
    sigmoid = e.masked_fill_(positive, 1.0).div_(sum_).masked_fill_(gone, 0.0)
    if beta:
        u.add_(beta)
    return g.mul_(sigmoid).mul_(u)


def exp_of_minus(a: Tensor, work: list[Tensor]) -> Tensor:
    """exp(-a), within 1.5 ulp.

    Args:
        a: contiguous float32, 0 to 87; NaN gives NaN.
        work: three contiguous float32 tensors of that shape, overwritten.

    Returns:
        float32, normal, one of `work`.
    """
    k, s, power = work
    factor = power.view(torch.int32)
    torch.mul(a, LOG2_E, out=k).add_(_ROUND)
    # The integer is in the sum's bits already. A NaN's bits give some factor, and NaN times it is NaN.
    torch.neg(k.view(torch.int32), out=factor).add_(_ROUND_BITS + _BIAS).bitwise_left_shift_(_POINT)
    k.sub_(_ROUND)
    torch.mul(k, LN2_HIGH, out=s).sub_(a).add_(k.mul_(LN2_LOW))
    k.fill_(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        k.mul_(s).add_(coefficient)
    return k.mul_(power)
