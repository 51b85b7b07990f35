"""A worker's ranks, as the worker has them: this process is rank 0, the others are its children."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from splitserve.config import CorePlacement, EngineConfig
from splitserve.decode.ranks import RankError, Ranks
from splitserve.kvconnector.ranked import TransferRankError
from splitserve.models.config import load_model_config
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.parallel import Alone, CollectiveError, Collectives
from splitserve.models.process_group import join_group, open_store
from splitserve.models.shard import Shard
from splitserve.request import Party, Role


@dataclass(frozen=True, slots=True)
class Team:
    """``group``: what rank 0 does together with the others; ``ranks``: the others, None if there are none."""

    group: Collectives
    ranks: Ranks | None

    @property
    def links(self) -> Sequence[Connection]:
        """To the connectors of ranks 1, 2, ..., in that order (:mod:`splitserve.decode.rank_messages`)."""
        return self.ranks.links if self.ranks is not None else ()

    @property
    def pids(self) -> Sequence[int]:
        """Of the processes of ranks 1, 2, ..."""
        return self.ranks.pids if self.ranks is not None else ()

    def wait_until_ready(self) -> None:
        """Until all others have loaded. Raises :class:`RankError`."""
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
    placement: CorePlacement | None = None,
) -> Iterator[Team]:
    """As many ranks as ``engine`` says, on ``device`` and those after it; they end with the context.

    ``engine``: all that depends on the device decided, ``threads`` of one rank; ``placement``: of the worker.
    ``on_failure`` is called once from a thread if a rank is lost. What then fails in the context comes out as the
    :class:`RankError` that is behind it.
    Raises :class:`ConfigError` if the model can't be shared by so many.
    """
    size = engine.tensor_parallel_size
    if size == 1:
        yield Team(Alone(), None)
        return
    check_tensor_parallel_size(load_model_config(engine.model), size)  # before anything is started
    store, port = open_store(size)
    ranks = Ranks(party, role, engine, port, on_failure, placement=placement)
    group: Collectives | None = None
    try:
        group = join_group(store, Shard(0, size), device)
        yield Team(group, ranks)
    except (CollectiveError, TransferRankError) as error:
        raise ranks.explain(error) from error
    finally:
        ranks.close()
        if group is not None:
            group.close()
