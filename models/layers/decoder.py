"""A decoder as a whole: embedding, a family's layers, final norm, LM head."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from splitserve.models.config import ModelConfig
from splitserve.models.layers.layer import Layer, WeightSource
from splitserve.models.layers.norm import RmsNorm, WideNorm
from splitserve.models.layers.residual import Normed, Residual
from splitserve.models.layers.step import NothingToSample, ScoredRows, Step
from splitserve.models.layers.weight import Role, Stack, TokenUnits, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from splitserve.kernels.api import NormedLinear

HEAD_NAME = "lm_head.weight"
SCORED_ROWS_AT_ONCE = 128  # bounds the memory of logits that aren't drawn from

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) while weights load."""


class DecoderLayer(Layer, ABC):
    """One layer of a family: adds to the residual what it computes from it."""

    @abstractmethod
    def __call__(self, x: Residual, step: Step) -> None: ...


MakeLayer: TypeAlias = Callable[[str, ModelConfig, int], DecoderLayer]
"""A function that declares a layer, given the prefix of its tensors' names, the config and the layer's number."""


MakeNorm: TypeAlias = Callable[[str, ModelConfig, Role], RmsNorm | WideNorm]
"""A function that declares a norm, given its name, the config and its use."""


class Decoder(Layer):
    """A causal language model whose tensors have the names that Hugging Face's decoders have in common.

    The embedding's table is whole on every rank: a lookup costs no time, and a split one would cost an all-reduce.
    """

    embedding: "Tensor"  # [vocab, hidden]; may be a view of the checkpoint's file, in the checkpoint's own dtype
    _head: "NormedLinear"

    def __init__(self, config: ModelConfig, layer: MakeLayer, norm: MakeNorm = RmsNorm) -> None:
        """``norm``: makes the final norm."""
        shape = (config.vocab_size, config.hidden_size)
        self.embedding_weight = Weight("model.embed_tokens.weight", shape, Role.EMBEDDING)
        self.is_tied = config.tie_word_embeddings
        head_name = self.embedding_weight.name if self.is_tied else HEAD_NAME
        self.head_weight = Weight(head_name, shape, Role.HEAD, rows=TokenUnits())
        self.layers = [layer(f"model.layers.{index}", config, index) for index in range(config.num_layers)]
        self._norm = norm("model.norm", config, Role.FINAL_NORM)
        self._embedding_scale, self._logits_scale = config.embedding_scale, config.logits_scale
        self._soft_cap = config.final_soft_cap

    def stacks(self) -> Iterator[Stack]:
        """Yield what is loaded; the head comes last, and isn't there if it is the embedding."""
        yield (self.embedding_weight,)
        yield from super().stacks()
        if not self.is_tied:
            yield (self.head_weight,)

    def load(self, source: WeightSource, progress: Progress | None = None) -> None:
        num_steps = len(self.layers) + 1
        for index, layer in enumerate(self.layers):
            layer.load(source)
            if progress is not None:
                progress(index + 1, num_steps)
        self.embedding, self._head = source.embedding_and_head(self.embedding_weight, self.head_weight)
        self._norm.load(source)
        if progress is not None:
            progress(num_steps, num_steps)

    def __call__(self, x: Residual, step: Step) -> "Tensor":
        """Return logits [R, vocab] of the step's rows to sample from. Raises :class:`.step.NothingToSample`."""
        if self._embedding_scale != 1.0:
            x.scale(self._embedding_scale)
        for layer in self.layers:
            layer(x, step)
        final = self._norm(x)
        if step.scored is not None:
            final = self._score(final, step.scored)
        return self._logits(final)

    def _logits(self, final: Normed) -> "Tensor":
        logits = self._head.after_norm(final.hidden, final.weight, final.eps, final.normed)
        if self._logits_scale != 1.0:
            logits = logits * self._logits_scale
        return logits if self._soft_cap is None else (logits / self._soft_cap).tanh() * self._soft_cap

    def _score(self, final: Normed, scored: ScoredRows) -> Normed:
        """Compute the logits of scored rows in pieces; return the rows to sample from. Raises NothingToSample."""
        num_rows = final.hidden.shape[0]
        for start in range(scored.num_drawing, num_rows, SCORED_ROWS_AT_ONCE):
            scored.take(self._logits(final.rows(start, min(start + SCORED_ROWS_AT_ONCE, num_rows))))
        if not scored.num_drawing:
            raise NothingToSample
        return final.rows(0, scored.num_drawing)
