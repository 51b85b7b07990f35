"""A worker's ranks, as the worker has them: this process is rank 0, the others are its children."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from splitserve.kvconnector.ranks.transfers import TransferRankError
from splitserve.models.config import load_model_config
from splitserve.models.declared import shard_of
from splitserve.models.parallel.process_group import join_group, open_store
from splitserve.models.parallel.ranks import Alone, CollectiveError, Collectives
from splitserve.protocol.config import CoreAffinity, EngineConfig
from splitserve.protocol.request import Party, Role
from splitserve.worker.ranks.others import RankError, Ranks
from splitserve.worker.ranks.starts import waiting_ranks


@dataclass(frozen=True, slots=True)
class Team:
    """``group``: what rank 0 does together with the others; ``ranks``: the others, None if there are none."""

    group: Collectives
    ranks: Ranks | None

    @property
    def links(self) -> Sequence[Connection]:
        """The links to the connectors of ranks 1, 2, ..., in that order (:mod:`splitserve.worker.ranks.messages`)."""
        return self.ranks.links if self.ranks is not None else ()

    @property
    def pids(self) -> Sequence[int]:
        """The process ids of ranks 1, 2, ..."""
        return self.ranks.pids if self.ranks is not None else ()

    def wait_until_ready(self) -> None:
        """Wait until all other ranks have loaded. Raises :class:`RankError`."""
        if self.ranks is not None:
            self.ranks.wait_until_ready()


@contextmanager
def start_team(
    party: Party,
    role: Role,
    engine: EngineConfig,
    device: torch.device,
    on_failure: Callable[[RankError], None],
    *,
    affinity: CoreAffinity | None = None,
) -> Iterator[Team]:
    """Start the ranks that ``engine`` asks for, on ``device`` and those after it; they end with the context.

    ``engine``: with all settings that depend on the device decided, ``threads`` of one rank; ``affinity``: of the
    worker. ``on_failure`` is called once from a thread if a rank is lost. Errors in the context that the loss causes
    are replaced by its :class:`RankError`.
    Raises :class:`ConfigError` if so many ranks can't share the model.
    """
    size = engine.tensor_parallel_size
    if size == 1:
        yield Team(Alone(), None)
        return
    shard = shard_of(
        load_model_config(engine.model, engine.model_backend), 0, size, engine.expert_parallel
    )  # before anything is started
    store, port = open_store(size)
    ranks = Ranks(party, role, engine, port, on_failure, affinity=affinity, started=waiting_ranks())
    group: Collectives | None = None
    try:
        group = join_group(store, shard, device)
        yield Team(group, ranks)
    except (CollectiveError, TransferRankError) as error:
        raise ranks.explain(error) from error
    finally:
        ranks.close()
        if group is not None:
            group.close()
