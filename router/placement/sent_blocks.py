"""Blocks that workers were sent, least recently used first: a prompt costs what its runs cost, not its blocks. Pure.

A run is a list of consecutive blocks with one history: the same workers were sent all of them, each by the same prompt
last. A prompt that leaves a run within it splits it; runs that a prompt gives the same history are joined. So workers
have and lose single blocks, as if each were kept on its own.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, repeat
from operator import ne


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive blocks, and the workers that have them, as bits of a number."""

    hashes: list[bytes]
    holders: int = 0
    awaited: int = 0  # those of ``holders`` that haven't computed the blocks, as far as known
    uses: dict[int, int] = field(default_factory=dict)  # number of the last use, by the bits of ``holders``
    is_fork: bool = False  # a prompt has left it here before: it would soon be split again


@dataclass(slots=True)
class _Uses:
    """The runs that one worker has."""

    runs: OrderedDict[int, list[_Run]] = field(default_factory=OrderedDict)  # by last use; beginnings of prompts first
    num_blocks: int = 0


class SentBlocks:
    """Blocks of all workers, each of which has a bit."""

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}  # by each of their blocks
        self._uses: dict[int, _Uses] = {}  # by the workers' bits
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._runs)

    def num_blocks(self, bit: int) -> int:
        """Return the number of blocks that a worker has."""
        return self._uses[bit].num_blocks if bit in self._uses else 0

    def note(self, bit: int, chain: Sequence[bytes], most: int) -> list[bytes]:
        """Note the blocks of a prompt, each of them once, that a worker was sent, which has room for ``most``; return
        those that are new to it. Blocks beyond its room are taken out: the least recently used ones, ends of prompts
        before their beginnings."""
        if not chain:
            return []
        uses = self._uses.setdefault(bit, _Uses())
        self._num_uses = number = self._num_uses + 1
        used, new = [], []
        for run in self._as_runs(chain):
            if run.holders & bit:
                self._unlist(run, bit, uses)
            else:
                new += run.hashes
                run.holders |= bit
                run.awaited |= bit
                uses.num_blocks += len(run.hashes)
            run.uses[bit] = number
            used.append(run)
        uses.runs[number] = used
        self._join(list(used))
        while uses.num_blocks > most:
            run = next(iter(uses.runs.values()))[-1]
            self._drop(self._split(run, max(0, len(run.hashes) + most - uses.num_blocks)), bit, uses)
        return new

    def note_computed(self, bit: int, chain: Sequence[bytes]) -> None:
        """Note that a worker has computed a prompt."""
        for run, at, count in self._overlaps(chain):
            if run is not None and run.awaited & bit:
                self._cut(run, at, count).awaited ^= bit

    def num_computed(self, bit: int, chain: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt, all of which a worker has, it has computed as far as known."""
        num_computed = 0
        for run, _, count in self._overlaps(chain):
            if run is not None and run.awaited & bit:
                break
            num_computed += count
        return num_computed

    def stretches(self, chain: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Yield the stretches of a prompt: the end of each, and the bits of the workers that have all of its blocks."""
        end = 0
        for run, _, count in self._overlaps(chain):
            end += count
            yield end, 0 if run is None else run.holders

    def last(self, bit: int, most: int) -> list[bytes]:
        """Return the last used blocks of a worker, at most ``most``; ends of prompts come before their beginnings."""
        last: list[bytes] = []
        for runs in reversed(self._uses[bit].runs.values() if bit in self._uses else ()):
            if len(last) >= most:
                break
            for run in runs:
                last += run.hashes
        return last[:most][::-1]

    def take(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """Take out blocks that a worker has lost; it need not have them."""
        lost: dict[_Run, set[bytes]] = {}
        for block_hash in block_hashes:
            run = self._runs.get(block_hash)
            if run is not None and run.holders & bit:
                lost.setdefault(run, set()).add(block_hash)
        for run, blocks in lost.items():
            for begin, end in reversed(_places(run.hashes, blocks)):
                self._drop(self._cut(run, begin, end - begin), bit, self._uses[bit])

    def forget(self, bit: int) -> None:
        """Take out all blocks of a worker."""
        uses = self._uses.get(bit, _Uses())
        for run in [run for runs in uses.runs.values() for run in runs]:
            self._drop(run, bit, uses)
        self._uses.pop(bit, None)

    # ---- the runs of a prompt ----

    def _overlaps(self, chain: Sequence[bytes]) -> Iterator[tuple[_Run | None, int, int]]:
        """Yield the runs that a prompt goes through, with the place in them and the number of blocks; for a block that
        no worker has, None. The caller may split the run that it was given last."""
        begin = 0
        while begin < len(chain):
            run = self._runs.get(chain[begin])
            at, count = (0, 1) if run is None else _overlap(run.hashes, chain, begin)
            yield run, at, count
            begin += count

    def _as_runs(self, chain: Sequence[bytes]) -> Iterator[_Run]:
        """Yield whole runs that make up a prompt: it splits those that it leaves within them, and its other blocks are
        new ones."""
        begin, runs = 0, self._runs
        while begin < len(chain):
            run = runs.get(chain[begin])
            if run is None:
                known = next(filter(runs.__contains__, islice(chain, begin, None)), None)
                run = _Run(list(chain[begin : None if known is None else chain.index(known, begin)]))
                runs.update(zip(run.hashes, repeat(run), strict=False))
            else:
                at, count = _overlap(run.hashes, chain, begin)
                is_fork = run.is_fork or at + count < len(run.hashes)
                run = self._cut(run, at, count)
                run.is_fork = is_fork
            yield run
            begin += len(run.hashes)

    # ---- runs ----

    def _cut(self, run: _Run, at: int, count: int) -> _Run:
        """Make ``count`` blocks of a run, from ``at`` on, a run of their own, and return it."""
        if at + count < len(run.hashes):
            self._split(run, at + count)
        return self._split(run, at)

    def _split(self, run: _Run, at: int) -> _Run:
        """Split a run, and return the part that begins ``at`` a place; at 0 that is the run itself."""
        if not at:
            return run
        rest = _Run(run.hashes[at:], run.holders, run.awaited, dict(run.uses), run.is_fork)
        del run.hashes[at:]
        run.is_fork = False
        self._runs.update(zip(rest.hashes, repeat(rest), strict=False))
        for bit, number in run.uses.items():
            runs = self._uses[bit].runs[number]
            runs.insert(runs.index(run) + 1, rest)
        return rest

    def _join(self, runs: Sequence[_Run]) -> None:
        """Join neighbours among a prompt's runs that have the same history."""
        first = runs[0]
        for run in runs[1:]:
            if first.is_fork or run.awaited != first.awaited or run.uses != first.uses or not self._adjoin(first, run):
                first = run
                continue
            for bit in run.uses:
                self._unlist(run, bit, self._uses[bit])
            first.hashes += run.hashes
            first.is_fork = run.is_fork
            self._runs.update(zip(run.hashes, repeat(first), strict=False))

    def _adjoin(self, first: _Run, second: _Run) -> bool:
        """Return whether two runs of one history are neighbours for each of their workers. Those that another router
        has told of come without their order in prompts."""
        lists = [self._uses[bit].runs[number] for bit, number in first.uses.items()]
        return all(runs[runs.index(first) + 1 :][:1] == [second] for runs in lists)

    def _unlist(self, run: _Run, bit: int, uses: _Uses) -> None:
        number = run.uses[bit]
        runs = uses.runs[number]
        runs.remove(run)
        if not runs:
            del uses.runs[number]

    def _drop(self, run: _Run, bit: int, uses: _Uses) -> None:
        """Take a run from a worker."""
        self._unlist(run, bit, uses)
        del run.uses[bit]
        uses.num_blocks -= len(run.hashes)
        run.holders ^= bit
        run.awaited &= ~bit
        if not run.holders:
            deque(map(self._runs.__delitem__, run.hashes), maxlen=0)  # a loop in C


def _overlap(hashes: Sequence[bytes], chain: Sequence[bytes], begin: int) -> tuple[int, int]:
    """Return the place in a run of the block at which a prompt begins to go through it, and the number of its blocks
    there."""
    at = 0 if hashes[0] == chain[begin] else hashes.index(chain[begin])
    own = hashes[at : at + len(chain) - begin]
    other = chain[begin : begin + len(own)]
    return at, len(own) if own == other else list(map(ne, own, other)).index(True)


def _places(hashes: Sequence[bytes], some: set[bytes]) -> list[tuple[int, int]]:
    """Return the begin and end of each stretch of a run that consists of ``some`` of its blocks."""
    rest = len(hashes) - len(some)
    if some.issuperset(hashes[rest:]):  # as a rule, ends are evicted first
        return [(rest, len(hashes))]
    places, begin = [], 0
    for is_one, stretch in groupby(hashes, some.__contains__):
        end = begin + len(list(stretch))
        if is_one:
            places.append((begin, end))
        begin = end
    return places
