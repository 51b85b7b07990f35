"""Models of what isn't computed in the twin: steps of devices, links between workers, the work of hosts."""

from typing import Annotated

import msgspec

from splitserve.models.expert_reads import ExpertReads
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Role
from splitserve.simulation.twin.step_times import ExpertLaw, StepLaw

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model of the reads of one worker: they take turns on its link."""

    read_seconds: Seconds = 5e-4  # of a read beside its bytes
    bytes_per_second: Annotated[float, msgspec.Meta(gt=0)] = 1e9

    def seconds(self, num_bytes: int) -> float:
        """Return the time of a read of ``num_bytes``."""
        return self.read_seconds + num_bytes / self.bytes_per_second


class CopyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model of copies between a rank's device and its host tier: those of one direction take turns."""

    copy_seconds: Seconds = 1e-4  # of a copy beside its bytes
    bytes_per_second: Annotated[float, msgspec.Meta(gt=0)] = 20e9

    def seconds(self, num_bytes: int) -> float:
        """Return the time of a copy of ``num_bytes``."""
        return self.copy_seconds + num_bytes / self.bytes_per_second


class HostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model of the processors' work."""

    prepare_seconds: Seconds = 1e-3  # in the router, from a request's arrival until its prompt is tokens
    message_seconds: Seconds = 2e-4  # of a message between processes, with its handling
    deliver_seconds: Seconds = 2e-4  # from the router's core to the client
    connect_seconds: Seconds = 2e-2  # of a connection between two workers
    offer_seconds: Seconds = 2e-4  # from prefill's last token until decode has the offer of its KV
    verify_seconds: Seconds = 0.0  # from a read's last byte until its blocks are verified
    step_seconds: Seconds = 0.0  # of a worker's loop between two steps, where it doesn't overlap with them
    sequence_seconds: Seconds = 0.0  # the same per sequence that decodes in the step
    token_seconds: Seconds = 0.0  # and per prompt token

    def loop_seconds(self, work: StepWork) -> float:
        """Return the time of a worker's loop for a step with this work."""
        return self.step_seconds + self.sequence_seconds * work.num_decodes + self.token_seconds * work.prefill_tokens


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Step-time models by role, and all else that the twin needs to know of a machine.

    ``errors``: the mean relative error of each step-time model on the steps that it was fitted on. ``scatters``: the
    standard deviation of whole loads' step time about it, relative to it; none: not known. ``source`` says
    in words where the models come from; ``is_measured`` is False for a roofline.
    """

    steps: dict[Role, StepModel]
    errors: dict[Role, float] = {}
    scatters: dict[Role, float] = {}
    link: LinkModel = LinkModel()
    host: HostModel = HostModel()
    copies: CopyModel = CopyModel()
    host_kv_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # host tier of each worker, over all of its ranks
    expert_reads: ExpertReads | None = (
        None  # of steps that are estimates of each role; None: steps are as their models say
    )
    num_ranks: Annotated[int, msgspec.Meta(ge=0)] = 0  # of each worker that the steps were fitted on; 0: not known
    source: str = ""
    is_measured: bool = False

    def step_model(self, role: Role) -> StepModel:
        """Return the model of the role's steps; where it is lacking, that of another role: the device is the same."""
        if role in self.steps:
            return self.steps[role]
        return max(self.steps.values(), key=lambda model: model.num_steps)

    def law(self, role: Role) -> StepLaw | None:
        """Return the law of the role's steps, where they aren't as :meth:`step_model` says."""
        return None if self.expert_reads is None else ExpertLaw(self.step_model(role), self.expert_reads, role)
