"""The operations of a decoder, one signature each, whatever backend runs them.

A :class:`Kernels` is chosen once at start (:mod:`splitserve.kernels.registry`) and holds one callable per operation.
Shapes use these letters: T tokens of the step (all sequences, flat, no padding), H query heads, G key/value heads,
D head_dim, B block_size. KV memory of one layer is a strided view ``[num_blocks, G, 2 (K/V), B, D]``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a paged-attention backend has to know before the first step. ``num_layers`` gives the block's stride."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device

    @property
    def rows_per_block(self) -> int:
        """Rows of ``[B, D]`` in one block of the KV memory, over all layers."""
        return self.num_layers * self.num_kv_heads * 2

    def slots(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Where tokens' keys go: int64 [T, G], rows of ``[D]`` relative to a layer's first row.

        ``block_ids``, ``offsets`` (in the block): int64 [T]. The value's row is ``block_size`` rows after the key's.
        """
        first = block_ids * (self.rows_per_block * self.block_size) + offsets
        heads = torch.arange(self.num_kv_heads, device=block_ids.device) * (2 * self.block_size)
        return first.unsqueeze(1) + heads


@dataclass(frozen=True, slots=True)
class TokenRows:
    """What a forward pass starts from. ``hidden`` [T, hidden] is overwritten by it; ``rotation`` is cos and sin [T, D]
    (:class:`PrepareQkv`); ``slots`` int64 [T, G] say where keys and values go (:meth:`AttentionShape.slots`)."""

    hidden: Tensor
    rotation: tuple[Tensor, Tensor]
    slots: Tensor


class BeginStep(Protocol):
    def __call__(
        self, inputs: Tensor, drawn: Tensor, embedding: Tensor, rotations: Tensor, shape: AttentionShape
    ) -> TokenRows:
        """``inputs`` int64 [4, T]: token ids, positions, blocks to write to (-1: nothing is written for that token; for
        graphs, where such rows fill up a step), and where in ``drawn`` a token stands that the host doesn't know yet
        (-1: nowhere). ``drawn`` int64, any negative id counts as 0; ``embedding``
        [vocab, hidden]; ``rotations`` [positions, 2 (cos, sin), D]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The sequences of one step, in the order of their query tokens in the flat batch.

    ``context_lens`` counts the tokens that the last query token of each sequence sees, itself included; the queries
    are the last ``query_lens`` of them. ``block_tables`` covers the context and may be longer.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]


class AttentionPlan(Protocol):
    """What a backend derives from a :class:`PagedBatch`, once per step; every layer's ``run`` uses the same one."""


class DecodePlan(AttentionPlan, Protocol):
    """A plan of fixed size, whose tensors stay where they are: a CUDA graph that ran with it can be replayed after
    :meth:`update`."""

    def update(self, batch: PagedBatch) -> None:
        """Fill it for ``batch``, with exactly as many sequences of one query token first, in the order of the current
        stream."""
        ...


class PagedAttention(Protocol):
    """Causal attention of flat query tokens over paged KV."""

    def plan(self, batch: PagedBatch) -> AttentionPlan: ...

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """For ``batch_size`` sequences of at most ``max_blocks`` blocks. Raises NotImplementedError without CUDA."""
        ...

    def make_mixed_plan(self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int) -> DecodePlan:
        """For ``num_decodes`` sequences of one query token, then up to ``num_chunks`` longer ones that have at most
        ``num_chunk_tokens`` together. Results of the query tokens left over are undefined. Raises NotImplementedError
        where there is no such plan."""
        ...

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """``query`` [T, H, D] over ``kv_layer`` [num_blocks, G, 2, B, D] -> [T, H, D]; scale is 1/sqrt(D).

        The keys and values of the query tokens themselves must have been written to ``kv_layer`` before.
        """
        ...


class ResidualLinear(Protocol):
    """A product that is added to the residual. See :class:`Linear`."""

    def add_to(self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor | None:
        """``residual`` [T, out_features] += the product, in place.

        Where it costs next to nothing, returns the residual RMS-normalised by ``norm``, for the product that follows.
        """
        ...


class NormedLinear(Protocol):
    """A product with what is normalised first. See :class:`Linear`."""

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """The product with the RMS-normalised ``x`` (:class:`RmsNorm`) -> [T, out_features].

        ``normed``: that ``x``, where there is one already (:meth:`ResidualLinear.add_to`).
        """
        ...


class Linear(ResidualLinear, NormedLinear, Protocol):
    """A weight [out_features, in_features] in the layout that its GEMM likes best, and its product with what a decoder
    has around it. ``x`` is [T, in_features]."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """-> [T, out_features]."""
        ...

    def parts(self, x: Tensor) -> Tensor:
        """-> [S, T, out_features], whose sum over S is the product: for who adds it up while reading it. One part is in
        the dtype of ``x``, several are in float32."""
        ...

    def parts_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """As :meth:`after_norm`, -> :meth:`parts`."""
        ...

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        """As ``after_norm``; the first half of the outputs gates the second (:class:`SiluMul`)
        -> [T, out_features / 2]."""
        ...


class RmsNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / rms(x) * weight`` over the last dimension, the mean taken in float32; ``weight`` broadcasts."""
        ...


class PrepareQkv(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        rotation: tuple[Tensor, Tensor],
        *,
        kv_layer: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Norm, rotation and KV write between the projection and attention. ``qkv`` [S, T, H + 2 * G, D] are its parts
        (:meth:`Linear.parts`); what is added up is rounded to the dtype of ``rotation``.

        Normalises queries and keys by ``qk_norm`` [H + G, D] if there is one, rotates the halves of each of their heads
        (the "neox" order) by ``rotation`` (cos, sin: [T, D]), writes keys and values into ``kv_layer`` [num_blocks, G,
        2, B, D] at ``slots`` [T, G] (:meth:`AttentionShape.slots`), returns the queries [T, H, D]. ``sin`` carries the
        sign of the rotation: its first half is negated (see ``models.decoder.RotaryEmbedding``).
        """
        ...


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """``gate_up`` [T, 2 * intermediate] -> ``silu(gate) * up`` [T, intermediate]. May overwrite ``gate_up``."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per row: how to draw. Plain numbers; ``temperatures`` 0 is greedy, ``top_ks`` 0 keeps all.

    ``positions`` index the drawn token in its sequence; with ``seeds`` and ``choices`` they key the draw.
    """

    temperatures: Sequence[float]
    top_ks: Sequence[int]
    top_ps: Sequence[float]
    seeds: Sequence[int]
    choices: Sequence[int]
    positions: Sequence[int]


class Sample(Protocol):
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """``logits`` [R, vocab], any float dtype -> ids int64 [R] on their device; -1 where a row isn't finite."""
        ...


class GatherKV(Protocol):
    def __call__(self, kv_cache: Tensor, block_ids: Tensor, first_head: int, out: Tensor) -> None:
        """Heads ``first_head : first_head + g`` of the blocks ``block_ids``, in their order, into one buffer.

        ``kv_cache`` [num_blocks, L, G, ...], contiguous; ``block_ids`` int64 [n] on its device, repeats allowed;
        ``out`` [n, L, g, ...] of its dtype, contiguous, on its device or in pinned host memory.
        """
        ...


class ScatterKV(Protocol):
    def __call__(self, source: Tensor, block_ids: Tensor, first_head: int, kv_cache: Tensor) -> None:
        """The way back: ``source`` [n, L, g, ...] into heads ``first_head : first_head + g`` of ``block_ids``.

        As :class:`GatherKV`, but ids must differ from each other. Other heads and other blocks stay as they are.
        """
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen operations. ``backends`` names the backend of each, for logs and ``splitserve doctor``."""

    begin_step: BeginStep
    rms_norm: RmsNorm
    prepare_qkv: PrepareQkv
    silu_mul: SiluMul
    sample: Sample
    pack_linear: Callable[[Tensor], Linear]
    make_attention: Callable[[AttentionShape], PagedAttention]
    gather_kv: GatherKV
    scatter_kv: ScatterKV
    backends: Mapping[str, str]
