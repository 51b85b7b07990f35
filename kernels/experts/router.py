"""A layer's router: RMS norm of its input, logits, and the choice of experts."""

from collections.abc import Callable

from torch import Tensor

from splitserve.kernels.api import Linear, RmsNorm, Route
from splitserve.kernels.experts.weights import RouterWeights


class PlainRouter:
    """A router as separate operations. See :class:`splitserve.kernels.experts.weights.Router`."""

    def __init__(
        self, weights: RouterWeights, *, pack_linear: Callable[[Tensor], Linear], rms_norm: RmsNorm, route: Route
    ) -> None:
        self.weights = weights
        self._linear, self._rms_norm, self._route = pack_linear(weights.weight), rms_norm, route

    def __call__(
        self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = self.weights
        if normed is None:
            normed = self._rms_norm(x, norm, eps)
        logits = self._linear(normed.float() if own.spec.wide_logits else normed)
        if own.bias is not None:
            logits = logits + own.bias
        return normed, *self._route(logits, own.correction, own.spec)
