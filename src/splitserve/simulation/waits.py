"""Waits of requests for each other in a simulated cluster: there is no cycle of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from splitserve.engine import sequence as engine
from splitserve.engine.stage import Stage
from splitserve.protocol.request import Party, RequestKey
from splitserve.simulation.worker.parts import sink_of, source_of

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker

Node: TypeAlias = tuple[Party, RequestKey]  # a request in a worker
_UNBEGUN = (Stage.UNGRANTED, Stage.QUEUED)


def check_waits(workers: Iterable["SimWorker"]) -> None:
    """Check that no request waits for itself: for room that is held, directly or through others, until it has run.

    A request waits for room in a worker, which all that hold blocks there may free; for its grant; for prompts before
    it; or for its own part in another worker. Reads, steps, copies and messages in flight end by themselves.
    """
    waits: dict[Node, list[Node]] = {}
    living = {worker.party: worker for worker in workers}
    for party, worker in living.items():
        for each in worker.core.state.sequences.values():
            waits[party, each.key] = list(_waits_for(worker, each, living))
    cycle = cycle_in(waits)
    assert not cycle, "requests wait in a cycle: " + " -> ".join(f"{key} in {party}" for party, key in cycle)


def cycle_in(waits: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Return nodes that wait for each other, the first one again at the end; [] if there are none."""
    done: set[Node] = set()
    for start in waits:
        path: dict[Node, Iterator[Node]] = {}
        node: Node | None = start
        while node is not None or path:
            if node is not None and node in path:
                nodes = list(path)
                return [*nodes[nodes.index(node) :], node]
            if node is not None and node not in done:
                path[node] = iter(waits.get(node, ()))
            last = next(reversed(path), None)
            if last is None:
                break
            node = next(path[last], None)
            if node is None:
                done.add(last)
                del path[last]
    return []


def _waits_for(worker: "SimWorker", sequence: engine.Sequence, living: Mapping[Party, "SimWorker"]) -> Iterator[Node]:
    party, key = worker.party, sequence.key
    sequences = worker.core.state.sequences.values()
    incoming = sink_of(worker.core).sink._incoming.get(key)
    ungranted = source_of(worker.core)._ungranted.get(key)
    is_unasked = incoming is not None and incoming.is_unasked
    if (sequence.stage is Stage.QUEUED and not sequence.block_ids) or (
        sequence.stage is Stage.UNADMITTED and not is_unasked
    ):
        yield from ((party, each.key) for each in sequences if each.block_ids and each is not sequence)
    elif sequence.stage is Stage.UNGRANTED and ungranted is not None:
        if not ungranted.is_asked:
            before = (each for each in sequences if each.number < sequence.number and each.stage in _UNBEGUN)
            yield from ((party, each.key) for each in before)
        elif (decode := living.get(ungranted.peer)) is not None:
            at_decode = sink_of(decode.core).sink._incoming.get(key)
            if at_decode is not None and not at_decode.is_unasked and at_decode.handover is None:
                yield ungranted.peer, key
    elif incoming is not None and (source := living.get(incoming.peer)) is not None:
        at_source = source.core.state.sequences.get(key)
        if is_unasked or (at_source is not None and at_source.stage in (Stage.QUEUED, Stage.PREFILLING)):
            asked = source_of(source.core)._ungranted.get(key)
            if asked is None or not asked.is_asked:
                yield incoming.peer, key
