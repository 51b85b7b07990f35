"""The law of the experts that a step reads: those that its tokens hit, if all experts are alike."""

import math
from typing import Annotated

import msgspec

from splitserve.models.config import ModelConfig
from splitserve.models.step_costs import decode_bytes
from splitserve.protocol.placement.step_model import StepWork
from splitserve.protocol.request import Role

FEW_SEQUENCES, MANY_SEQUENCES = 8, 128
"""Batches whose experts are exact on the straight line that a step model has; those of other batches are near it."""


class ExpertLine(msgspec.Struct, frozen=True):
    """Experts of a layer that a step model counts."""

    base: float = 0.0  # in each step
    per_decode: float = 0.0  # with each sequence that decodes


class ExpertReads(msgspec.Struct, frozen=True, kw_only=True):
    """Reads of a mixture's experts in a step: a curve over its tokens, where a step model has a straight line."""

    num_experts: Annotated[int, msgspec.Meta(ge=1)]  # of a layer
    missed: Annotated[float, msgspec.Meta(ge=0, le=1)]  # probability that a token doesn't have a given expert
    expert_seconds: Annotated[float, msgspec.Meta(ge=0)]  # to read one expert of every layer

    def hit(self, num_tokens: float) -> float:
        """Return the experts of a layer that any of a step's tokens has, in the mean."""
        return self.num_experts * (1 - math.pow(self.missed, num_tokens))

    def line(self, role: Role) -> ExpertLine:
        """Return what the step model of a role's workers counts: steps of prompts hit nearly all experts."""
        if role is Role.PREFILL:
            return ExpertLine(self.num_experts)
        few, many = self.hit(FEW_SEQUENCES), self.hit(MANY_SEQUENCES)
        per_decode = (many - few) / (MANY_SEQUENCES - FEW_SEQUENCES)
        return ExpertLine(few - FEW_SEQUENCES * per_decode, per_decode)

    def seconds_beyond(self, role: Role, work: StepWork) -> float:
        """Return the seconds by which a step's reads differ from those in the role's model; negative: are less."""
        line = self.line(role)
        counted = line.base + line.per_decode * work.num_decodes
        return (self.hit(work.num_decodes + work.prefill_tokens) - counted) * self.expert_seconds


def expert_reads(config: ModelConfig, itemsize: int, bytes_per_second: float) -> ExpertReads | None:
    """Return the reads of a model's experts; None if it has none. ``itemsize``: of weights, in bytes."""
    if config.experts is None:
        return None
    router = config.experts.router
    num_bytes = decode_bytes(config, 0, 0, itemsize) - decode_bytes(config, 0, 0, itemsize, 0.0)
    return ExpertReads(
        num_experts=router.num_experts,
        missed=1 - router.top_k / router.num_experts,
        expert_seconds=num_bytes / router.num_experts / bytes_per_second,
    )
