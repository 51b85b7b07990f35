"""The operations of a decoder: one signature each, the same for all backends.

A :class:`Kernels` is chosen once at start (:mod:`splitserve.kernels.registry`) and holds one callable per operation.
Shapes use these letters: T tokens of the step (all sequences, flat, no padding), H query heads, G key/value heads, D
head_dim, B block_size. KV memory of one layer is a strided view ``[num_blocks, G, 2 (K/V), B, D]``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from splitserve.kernels.experts.spec import RouterSpec
from splitserve.kernels.experts.weights import Experts, ExpertWeights, Router, RouterWeights
from splitserve.kernels.latent.shape import LatentShape
from splitserve.kernels.norms import Norm, NormWeights
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.sampling import MaskLogits, PenaliseLogits, Sample, ScoreTokens


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that a paged-attention backend needs before the first step. ``num_layers`` determines the block's
    stride."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # scores are bounded by it: cap * tanh(score / cap)
    window: int | None = None  # tokens that a query attends to, the last one its own; None: all
    has_sinks: bool = False  # whether run gets them
    latent: LatentShape | None = None  # of latent attention; num_kv_heads is 1 then, and head_dim the rotated part's

    @property
    def score_scale(self) -> float:
        """Factor of a query's products with keys."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def rows_per_block(self) -> int:
        """Rows of ``[B, D]``, or of ``[B, width]`` latents, in one block of the KV memory, over all layers."""
        return self.num_layers if self.latent is not None else self.num_layers * self.num_kv_heads * 2

    def slots(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the slots of tokens' keys: int64 [T, G], rows of ``[D]`` relative to a layer's first row.

        ``block_ids``, ``offsets`` (within the block): int64 [T]. The value's row is ``block_size`` rows after the
        key's.
        """
        first = block_ids * (self.rows_per_block * self.block_size) + offsets
        heads = torch.arange(self.num_kv_heads, device=block_ids.device) * (2 * self.block_size)
        return first.unsqueeze(1) + heads


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Inputs of a forward pass."""

    hidden: Tensor  # [T, hidden]; the forward pass overwrites it
    rotation: tuple[Tensor, Tensor]  # cos and sin [T, D]; see PrepareQkv
    slots: Tensor  # int64 [N, T, G], location of keys and values in N groups of the cache; see AttentionShape.slots
    # What some models need besides, made by the model: rotations of other layers by name, factors [T, 1, 1] of queries
    other_rotations: Mapping[str | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    query_factors: Tensor | None = None


class BeginStep(Protocol):
    def __call__(
        self, inputs: Tensor, drawn: Tensor, embedding: Tensor, rotations: Tensor, shapes: Sequence[AttentionShape]
    ) -> TokenRows:
        """Compute the inputs of a forward pass over a cache of N groups, which ``shapes`` describe.

        ``inputs`` int64 [3 + N, T]: token ids; positions; the index in ``drawn`` of a token that the host doesn't know
        yet (-1: the token id counts); the blocks of each group to write to (-1: nothing is written for that token, as
        for rows that fill up a step of a CUDA graph). ``drawn``: int64, any negative id counts as 0; ``embedding``:
        [vocab, hidden]; ``rotations``: [positions, 2 (cos, sin), D].
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The sequences of one step, in the order of their query tokens in the flat batch."""

    query_lens: Sequence[int]  # the queries are the last tokens of each context
    context_lens: Sequence[int]  # tokens that the last query token of each sequence attends to, itself included
    block_tables: Sequence[Sequence[int]]  # cover the context and may be longer


class AttentionPlan(Protocol):
    """Data that a backend derives from a :class:`PagedBatch` once per step, used by every layer's ``run``. It is valid
    until another plan of the same attention is made or filled, since these may share memory."""


class DecodePlan(AttentionPlan, Protocol):
    """A plan of fixed size whose tensors keep their addresses: a CUDA graph captured with it can be replayed after
    :meth:`update`."""

    def update(self, batch: PagedBatch) -> None:
        """Fill the plan for ``batch``, which begins with exactly as many sequences of one query token, in the order of
        the current stream. If the last of these have one table (the same object) and one context, they are one
        sequence that is repeated, with one query: a backend may compute it once."""
        ...


class MixedPlan(DecodePlan, Protocol):
    """A :class:`DecodePlan` for longer chunks, too."""

    def suits(self, batch: PagedBatch, /) -> bool:
        """Return whether this plan should serve ``batch``, which isn't padded yet. If not, a later plan does, or the
        step is launched kernel by kernel: its attention may have another form there."""
        ...


class PagedAttention(Protocol):
    """Causal attention of flat query tokens over paged KV."""

    def plan(self, batch: PagedBatch) -> AttentionPlan: ...

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """Make a plan for ``batch_size`` sequences of at most ``max_blocks`` blocks. Raises NotImplementedError without
        CUDA."""
        ...

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """Make plans for ``num_decodes`` sequences of one query token, then up to ``num_chunks`` longer ones with at
        most ``num_chunk_tokens`` in total. Their attention has different forms: the first that suits a step is best.

        Results of unused query tokens are undefined. Raises NotImplementedError if the backend has no such plan.
        """
        ...

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """Attend with ``query`` [T, H, D] over ``kv_layer`` [num_blocks, G, 2, B, D] -> [T, H, D].

        The keys and values of the query tokens themselves must have been written to ``kv_layer`` before. ``sinks``:
        float32 [H], a score of each head that no token has (arXiv:2309.17453): it takes its share of the softmax and
        adds nothing. Given if the shape says so, and only then.
        """
        ...


class LatentAttention(Protocol):
    """Causal attention of flat query tokens over paged latents. Its plans are as in :class:`PagedAttention`."""

    def plan(self, batch: PagedBatch) -> AttentionPlan: ...

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """See :meth:`PagedAttention.make_decode_plan`."""
        ...

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :meth:`PagedAttention.make_mixed_plans`."""
        ...

    def run_latent(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend with ``query`` [T, H, query_dim] over ``kv_layer`` [num_blocks, B, width] -> [T, H, value_dim].

        ``expansion`` [H, plain_dim + value_dim, rank] makes a head's key without its rotated part, then its value, from
        a latent. Two orders of the products give the same: to expand the latents to keys and values, or to absorb the
        expansion into queries and results, which then attend to the latents themselves. The backend chooses.
        """
        ...


AnyAttention: TypeAlias = PagedAttention | LatentAttention


class ResidualLinear(Protocol):
    """A product that is added to the residual. See :class:`Linear`."""

    def add_to(
        self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, bias: Tensor | None = None
    ) -> Tensor | None:
        """Add the product, and ``bias`` [out_features], to ``residual`` [T, out_features], in place.

        Return None; or, where that costs next to nothing, the residual RMS-normalised by ``norm`` for the next product.
        """
        ...


class NormedLinear(Protocol):
    """A product with a normalised input. See :class:`Linear`."""

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """Return the product with the RMS-normalised ``x`` (:class:`RmsNorm`) -> [T, out_features].

        ``normed``: the normalised ``x``, if it is computed already (:meth:`ResidualLinear.add_to`).
        """
        ...


class Linear(ResidualLinear, NormedLinear, Protocol):
    """A weight [out_features, in_features] in the layout that suits its GEMM, with the products that a decoder needs.
    ``x`` is [T, in_features]."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product -> [T, out_features]."""
        ...

    def parts(self, x: Tensor) -> Tensor:
        """Return split-K parts -> [S, T, out_features] whose sum over S is the product, for a consumer that sums the
        parts itself. A single part has the dtype of ``x``, several are float32."""
        ...

    def parts_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """Return the parts (:meth:`parts`) of the product of :meth:`after_norm`."""
        ...

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """Return the product of ``after_norm``, its second half gated by the first (:class:`SiluMul`) -> [T,
        out_features / 2]."""
        ...


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension, with the mean in float32; ``weight`` broadcasts."""
        ...


class PrepareQkv(Protocol):
    def __call__(self, raw: RawQkv, kv_layer: Tensor) -> Tensor:
        """Apply norm, rotation and KV write, between the projection and attention; return the queries [T, H, D].

        Keys and values are written into ``kv_layer`` [num_blocks, G, 2, B, D].
        """
        ...


class PrepareLatent(Protocol):
    def __call__(
        self,
        query: Tensor,
        latent: Tensor,
        norm: Tensor,
        eps: float,
        rotation: tuple[Tensor, Tensor],
        *,
        kv_layer: Tensor,
        slots: Tensor,
    ) -> None:
        """Apply norm, rotation and KV write, between the projections and latent attention.

        The last ``rotated_dim`` elements of each head of ``query`` [T, H, query_dim] are rotated in place. ``latent``
        [T, width]: its first ``rank`` elements are RMS-normalised by ``norm`` [rank], the others are rotated, and both
        are written into ``kv_layer`` [num_blocks, B, width] at ``slots`` [T, 1] (:meth:`AttentionShape.slots`).
        ``rotation`` is that of :class:`PrepareQkv`.
        """
        ...


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` [T, intermediate] of ``gate_up`` [T, 2 * intermediate]. May overwrite
        ``gate_up``."""
        ...


class GeluMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return ``gelu(gate) * up`` [T, intermediate] of ``gate_up`` [T, 2 * intermediate]; GELU is approximated with
        tanh (arXiv:1606.08415)."""
        ...


class Route(Protocol):
    def __call__(self, logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        """Choose experts by ``logits`` [T, E], any float dtype -> experts int32 [T, k], weights float32 [T, k].

        ``bias`` float32 [E]: the correction bias, None without one. The order of a token's experts is not defined.
        Experts of rows that are not finite are any valid ones.
        """
        ...


class GatherKV(Protocol):
    def __call__(self, kv_cache: Tensor, block_ids: Tensor, first_head: int, out: Tensor) -> None:
        """Copy heads ``first_head : first_head + g`` of the blocks ``block_ids``, in order, into one buffer.

        ``kv_cache`` [num_blocks, L, G, ...], contiguous; ``block_ids`` int64 [n] on its device, repeats allowed;
        ``out`` [n, L, g, ...] of its dtype, contiguous, on its device or in pinned host memory.
        """
        ...


class ScatterKV(Protocol):
    def __call__(self, source: Tensor, block_ids: Tensor, first_head: int, kv_cache: Tensor) -> None:
        """Copy ``source`` [n, L, g, ...] into heads ``first_head : first_head + g`` of ``block_ids``.

        The reverse of :class:`GatherKV`, except that ids must be distinct. Other heads and other blocks stay unchanged.
        """
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen operations. ``backends`` names the backend of each, for logs and ``splitserve doctor``."""

    begin_step: BeginStep
    rms_norm: RmsNorm
    prepare_qkv: PrepareQkv
    pack_norm: Callable[[NormWeights], Norm]
    silu_mul: SiluMul
    gelu_mul: GeluMul
    sample: Sample
    mask_logits: MaskLogits
    penalise_logits: PenaliseLogits
    score_tokens: ScoreTokens
    pack_linear: Callable[[Tensor], Linear]
    route: Route
    pack_router: Callable[[RouterWeights], Router]
    pack_experts: Callable[[ExpertWeights], Experts]
    make_attention: Callable[[AttentionShape], PagedAttention]
    prepare_latent: PrepareLatent
    make_latent_attention: Callable[[AttentionShape], LatentAttention]
    gather_kv: GatherKV
    scatter_kv: ScatterKV
    backends: Mapping[str, str]
