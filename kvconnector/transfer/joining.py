"""Joining of events: a read or a connection whose parts are executed by several threads, or ranks."""

from collections.abc import Sequence

from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.handover.reads import ReadResult

NO_GENERATION = -1  # no block can have been offered with it


class ConnectionJoin:
    """Join of a connection's parts: a peer is connected once every part is. The link is that of the part that measured
    one; of several, the slowest."""

    def __init__(self, num_parts: int) -> None:
        self._num_left = num_parts
        self._events: list[PeerConnected] = []

    def add(self, event: PeerConnected) -> PeerConnected | None:
        self._events.append(event)
        self._num_left -= 1
        if self._num_left:
            return None
        error = next((each.error for each in self._events if each.error is not None), None)
        links = [each.link for each in self._events if each.link is not None]
        link = min(links, key=lambda each: each.bytes_per_second, default=None)
        return PeerConnected(event.peer, error, link)


class ReadJoin:
    """Join of a read's parts: a read is terminal once all its parts are; only then can nothing write to its blocks any
    more."""

    def __init__(self, num_parts: int) -> None:
        self._results: list[ReadResult | None] = [None] * num_parts

    def add(self, part: int, result: ReadResult) -> list[ReadResult] | None:
        """Add a part's result; return all results, in the order of the parts, if it was the last one."""
        self._results[part] = result
        results = [each for each in self._results if each is not None]
        return results if len(results) == len(self._results) else None


def one_after_the_other(results: Sequence[ReadResult]) -> ReadResult:
    """Join the results of parts that each read some of the blocks."""
    if len(results) == 1:
        return results[0]
    return ReadResult(
        results[0].read_id,
        _first_error(results),
        [generation for each in results for generation in each.generations],
        max(each.seconds for each in results),
        [digest for each in results for digest in each.digests],
        results[0].path,
        results[0].stages,
    )


def side_by_side(results: Sequence[ReadResult]) -> ReadResult:
    """Join the results of ranks that each read their heads of all blocks; all ranks must have found the same
    generations.

    Digests are those of the first rank's blocks, like the offered ones. Path and stages are those of the slowest rank,
    since each rank has a link of its own.
    """
    generations = [
        found[0] if len(set(found)) == 1 else NO_GENERATION
        for found in zip(*(each.generations for each in results), strict=False)
    ]
    slowest = max(results, key=lambda each: each.seconds)
    return ReadResult(
        results[0].read_id,
        _first_error(results),
        generations,
        slowest.seconds,
        results[0].digests,
        slowest.path,
        slowest.stages,
    )


def _first_error(results: Sequence[ReadResult]) -> str | None:
    return next((each.error for each in results if each.error is not None), None)
