"""Check that a frozen worker stands still, keeps its requests' KV, and takes none of their time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.engine.stage import Stage
from splitserve.protocol.request import RequestKey

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker

ROUNDING_SECONDS = 1e-6
_RUNS = (Stage.PREFILLING, Stage.DECODING)


@dataclass(frozen=True, slots=True)
class _Still:
    """A request that runs, as it is while nothing may change."""

    stage: Stage
    num_tokens: int
    blocks: tuple[tuple[int, int], ...]  # with their generations


class Frozen:
    """The observer of one worker's freezes, as operators ask for them."""

    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker
        self._left: dict[RequestKey, float] | None = None  # seconds to the deadlines at the freeze; None: there is none
        self._still: dict[RequestKey, _Still] = {}  # since the last step was committed

    def on_launch(self) -> None:
        """Check that a step may begin."""
        is_frozen = self._worker.core.state.is_frozen
        assert not is_frozen, f"{self._worker.party} is frozen, and begins a step"

    def check(self) -> None:
        """Check what has changed since the last call."""
        state, clock = self._worker.core.state, self._worker.clock
        if not state.is_frozen:
            for key, left in (self._left or {}).items():
                found = state.sequences.get(key)
                seconds = left if found is None else found.deadline - clock
                is_exact = abs(seconds - left) <= ROUNDING_SECONDS
                assert is_exact, f"{key} had {left:.3f} s left when it was frozen, and {seconds:.3f} s when it goes on"
            self._left, self._still = None, {}
            return
        if self._left is None:
            self._left = {key: sequence.deadline - clock for key, sequence in state.sequences.items()}
        if not self._worker.core._steps:
            self._check_still()

    def _check_still(self) -> None:
        """Check the requests that ran when the last step was committed, as far as none has ended since."""
        generations, sequences = self._worker.generations, self._worker.core.state.sequences
        now = dict[RequestKey, _Still]()
        for key, sequence in sequences.items():
            if sequence.stage in _RUNS or (key in self._still and not sequence.has_ended):
                blocks = tuple((block_id, int(generations[block_id])) for block_id in sequence.block_ids)
                now[key] = _Still(sequence.stage, len(sequence.token_ids), blocks)
        for key, before in self._still.items():
            found = now.get(key, before)
            assert found == before, f"{key} does not stand still in a frozen worker: {found} instead of {before}"
        self._still = now
