"""The activation of an expert's gate and up projections, inside Triton kernels."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Mapping

import triton
import triton.language as tl

ACTIVATION_NUMBERS: Mapping[str, int] = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
"""The kernels' numbers of :data:`splitserve.kernels.experts.reference.FUNCTIONS`."""


@triton.jit
def activate(gate, up, limit, sigmoid_factor, up_offset, HAS_LIMIT: tl.constexpr, FUNCTION: tl.constexpr):
    """Return the activation in float32: see :class:`splitserve.kernels.experts.spec.GatedActivation`."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
    if FUNCTION == 0:
        gate = gate / (1.0 + tl.exp(-gate * sigmoid_factor))
    if FUNCTION == 1:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    if FUNCTION == 2:
        bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * bent))
    return gate * (up + up_offset)
