"""Norms in float32 in plain PyTorch. See :mod:`splitserve.kernels.norms`."""

from torch import Tensor

from splitserve.kernels.norms import NormWeights


class PlainNorm:
    """See :class:`splitserve.kernels.norms.Norm`."""

    def __init__(self, weights: NormWeights) -> None:
        self.weights = weights

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        normed = _normalised(x, self.weights)
        return normed if out is None else out.copy_(normed)

    def add_to(self, residual: Tensor, x: Tensor, following: NormWeights | None = None) -> Tensor | None:
        residual.add_(self(x))
        return None if following is None else _normalised(residual, following)


def _normalised(x: Tensor, norm: NormWeights) -> Tensor:
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
    return (wide if norm.shift is None else wide + norm.shift).to(x.dtype)
