"""Messages between a worker and its other ranks: plain pipes within one machine, msgpack, no pickle.

worker -> rank: one RankOrder as the first line on the rank's life line, then a StepPlan for each step on a pipe of its
                own, whose end means the worker's orderly end. The life line's end means that the worker is gone.
rank -> worker: RankReady once, and RankFailed if it ends with an error
both ways:      the link between the worker's connector and the rank's; the connectors define its messages
"""

import msgspec

from splitserve.protocol.config import CoreAffinity, EngineConfig
from splitserve.protocol.request import Party, Role


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The identity and settings of a rank. ``engine`` and ``affinity`` are the worker's, with all settings that depend
    on the device decided.

    ``store_port``: the port of the ranks' store. ``environment``: variables that the worker has set for itself and its
    ranks; one that was forked before has them from here.
    """

    party: Party
    role: Role
    rank: int
    engine: EngineConfig
    affinity: CoreAffinity
    store_port: int
    environment: dict[str, str]
    log_level: str

    @property
    def name(self) -> str:
        """The rank's name in logs and errors."""
        return f"{self.party.engine_id} rank {self.rank}"


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank's report that it has loaded its part, and waits for steps."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank's last report. ``is_consequence``: a collective failed, most often because another rank failed before."""

    message: str
    is_consequence: bool


RankReport = RankReady | RankFailed
