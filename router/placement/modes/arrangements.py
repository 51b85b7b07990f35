"""Arrangements: whether each worker should do both phases of its requests, instead of one phase of all. Pure.

A prefill worker that also decodes computes all its prompts in chunks. So requests that move one by one from two workers
to one make things worse before they get better, and a policy that compares routes of single requests doesn't move them.
Here the arrangements are compared as a whole, by the rate that each holds within the objectives in a steady state:
prompts and outputs have mean lengths, and outputs end as fast as requests come. Gaps are judged two standard deviations
above the mean number of sequences, TTFT by the slow waits for prefill. Where prompts are computed beside outputs, the
wait is computed with a number of sequences one standard deviation above its mean.

Workers of one phase hardly run steps that do both. Their time is put together from what prefill workers know of prompts
and decode workers of outputs.
"""

import math
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple

from splitserve.protocol.placement.chunk_bounds import sized_tokens
from splitserve.protocol.placement.step_model import StepModel
from splitserve.router.placement.modes.recent_sizes import RecentSizes
from splitserve.router.placement.policies import DEFAULT_CHUNK_TOKENS, WorkerView
from splitserve.router.requests.objectives import Objectives

DEVIATIONS = 2.0
"""Standard deviations above the mean number of sequences, at which gaps are judged."""
WAIT_DEVIATIONS = 1.0
"""Standard deviations above the mean number of sequences, at which the wait for a worker that does both phases is
judged: with more sequences its chunks are smaller, and a prompt takes longer."""
SLOW = 0.01
"""Share of the waits that may be longer than the slow ones."""
MOST_BUSY = 0.95
"""Share of a worker's time that prompts can take, at most."""
MAX_WORKERS = 32
"""Workers of a pool whose models make the usual worker's: enough, and a large pool costs no more than a small one."""
LEAST_SECONDS = 1e-6
"""Of a step or a prompt, whatever a worker's model says."""
_HALVINGS = 12


class Sizes(NamedTuple):
    """Mean sizes of requests, in tokens; see :class:`RecentSizes`."""

    prompt: float
    computed: float
    long: float
    output: float

    @classmethod
    def of(cls, recent: RecentSizes) -> "Sizes":
        return cls(recent.prompt, max(1.0, recent.computed), max(1.0, recent.long), max(1.0, recent.output))

    @property
    def context(self) -> float:
        """Tokens that a sequence attends to when half of its output is out."""
        return self.prompt + self.output / 2


class Pool(NamedTuple):
    """The usual worker of a role, and their number."""

    number: int
    model: StepModel
    chunk_tokens: int  # of a prompt, in a step that doesn't decode
    chunk_bounds: tuple[int, int]  # of prompts in one that does, as ChunkBounds
    max_num_seqs: int
    kv_capacity_tokens: int

    @classmethod
    def of(cls, workers: Iterable[WorkerView]) -> "Pool":
        """Return the pool of these workers; there is one at least."""
        views = list(workers)
        some, first = views[:MAX_WORKERS], views[0]
        columns = zip(*(each.step_model.coefficients for each in some), strict=True)
        model = StepModel.of([fmean(column) for column in columns], max(each.step_model.num_steps for each in some))
        chunk = first.chunk_tokens or DEFAULT_CHUNK_TOKENS
        fixed = first.shared_chunk_tokens or chunk
        least = min(each.max_num_seqs for each in some), min(each.kv_capacity_tokens for each in some)
        return cls(len(views), model, chunk, (fixed, first.sized_chunk_tokens or fixed), *least)

    def max_sequences(self, sizes: Sizes) -> float:
        """Return the sequences of these sizes that a worker has room for."""
        room = self.kv_capacity_tokens / (sizes.prompt + sizes.output)
        return max(1.0, min(self.max_num_seqs, room))

    def decode_step(self, num_sequences: float, sizes: Sizes) -> float:
        """Return the seconds of a step that decodes."""
        own = self.model
        seconds = own.base + num_sequences * (own.per_decode + own.per_context * sizes.context)
        return max(LEAST_SECONDS, seconds)

    def prompt(self, num_tokens: float) -> float:
        """Return the seconds of a prompt on a worker where nothing decodes."""
        return max(LEAST_SECONDS, self.model.prefill_seconds(0, int(num_tokens), self.chunk_tokens))


class _Mixed(NamedTuple):
    """A worker that does both phases, with a number of sequences; times in seconds."""

    step: float  # that only decodes
    mixed_step: float  # with a chunk of a prompt
    num_chunks: float  # of a usual prompt
    num_long_chunks: int  # of a long one

    @property
    def prompt(self) -> float:
        """Seconds of a usual prompt, without waits."""
        return self.num_chunks * self.mixed_step

    @property
    def late(self) -> float:
        """Seconds of a long one, with half a step until the next one begins."""
        return (self.num_long_chunks + 0.5) * self.mixed_step

    @property
    def lost_steps(self) -> float:
        """Steps that could have been made in the time that a prompt adds to them."""
        return self.num_chunks * (self.mixed_step / self.step - 1.0)


class Arrangements:
    """Rates that prefill and decode workers of the same model and device hold within the objectives, for requests of
    these sizes, in requests per second."""

    def __init__(self, prefill: Pool, decode: Pool, sizes: Sizes, objectives: Objectives) -> None:
        self._prefill, self._decode, self._sizes = prefill, decode, sizes
        self._ttft, self._gap = objectives.ttft_seconds, objectives.tpot_seconds
        self._alone = prefill.prompt(sizes.computed)

    def disaggregated(self) -> float:
        """Return what they hold where prefill workers compute prompts and decode workers draw outputs, and those with
        time to spare help the others."""
        prompts, outputs = self.prompts(), self.outputs()
        if prompts < outputs:
            return max(prompts, self._both(self._decode.number, helpers=self._prefill.number))
        return max(outputs, self._both(self._prefill.number, outputs=outputs))

    def aggregated(self) -> float:
        """Return what they hold where each worker does both phases of its requests."""
        return self._both(self._prefill.number + self._decode.number)

    def prompts(self) -> float:
        """Return what prefill workers hold that do nothing else."""
        number, alone, long = self._prefill.number, self._alone, self._prefill.prompt(self._sizes.long)
        return _greatest(lambda rate: long + slow_wait(rate * alone, number, alone) <= self._ttft, number / alone)

    def outputs(self) -> float:
        """Return what decode workers hold that do nothing else."""
        decode, sizes = self._decode, self._sizes

        def is_held(num_sequences: float) -> bool:
            return decode.decode_step(_many(num_sequences, decode.number), sizes) <= self._gap

        num_sequences = _greatest(is_held, decode.max_sequences(sizes))
        return decode.number * num_sequences / (sizes.output * decode.decode_step(num_sequences, sizes))

    def _both(self, number: int, *, outputs: float = 0.0, helpers: int = 0) -> float:
        """Return what is held where so many workers do both phases. Others draw ``outputs`` per second, or so many
        ``helpers`` compute their share of the prompts, by their speed."""

        def rate(num_sequences: float, part: float) -> float:
            """Return the rate at which the workers have so many sequences, if they compute a part of the prompts."""
            usual = self._mixed(num_sequences)
            drawn = outputs * self._sizes.output + number * num_sequences / usual.step  # tokens, if prompts were none
            return drawn / (self._sizes.output + part * num_sequences * usual.lost_steps)

        def part_of(worker: _Mixed) -> float:
            return number / (number + helpers * worker.prompt / self._alone)

        def is_held(num_sequences: float) -> bool:
            if self._mixed(_many(num_sequences, number)).mixed_step > self._gap:
                return False
            part = part_of(self._mixed(num_sequences))
            busy = self._mixed(_many(num_sequences, number, WAIT_DEVIATIONS))
            share = rate(num_sequences, part) * part * busy.prompt / number  # of the time of each, helpers or not
            seconds = part * busy.prompt + (1 - part) * self._alone
            wait = slow_wait(share * (number + helpers), number + helpers, seconds)
            return busy.late + wait <= self._ttft

        room = min(self._prefill.max_sequences(self._sizes), self._decode.max_sequences(self._sizes))
        best = _greatest(is_held, room)
        return rate(best, part_of(self._mixed(best)))

    def _mixed(self, num_sequences: float) -> _Mixed:
        """Return a worker with so many sequences. Chunks are those of the middle of a prompt, as workers size them
        (:func:`splitserve.protocol.placement.chunk_bounds.sized_tokens`)."""
        model, sizes, bounds = self._prefill.model, self._sizes, self._prefill.chunk_bounds
        step, middle = self._decode.decode_step(num_sequences, sizes), int(sizes.computed / 2)
        chunk = min(float(sized_tokens(model, step, middle, self._gap, bounds)), sizes.computed)
        mixed_step = step + model.chunk_seconds(middle, chunk)
        return _Mixed(step, mixed_step, sizes.computed / chunk, math.ceil(sizes.long / chunk))


def slow_wait(num_busy: float, number: int, seconds: float) -> float:
    """Return the 99th percentile of the wait for one of ``number`` workers of which ``num_busy`` are busy on average,
    each for ``seconds``; infinite where none has time.

    The mean is Sakasegawa's (1977) for equal times, and the tail is taken to be exponential.
    """
    share = num_busy / number
    if share >= MOST_BUSY:
        return math.inf
    odds = share ** (math.sqrt(2 * (number + 1)) - 1)  # that one has to wait
    return seconds / (2 * number * (1 - share)) * math.log(odds / SLOW) if odds > SLOW else 0.0


def _many(num_sequences: float, number: int, deviations: float = DEVIATIONS) -> float:
    """Return the sequences of a worker at times of many, from the mean; ``number`` workers share them evenly."""
    return num_sequences + deviations * math.sqrt(num_sequences / number)


def _greatest(holds: Callable[[float], bool], most: float) -> float:
    """Return the greatest number up to ``most`` for which something holds, nearly."""
    least = 0.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if holds(middle) else (least, middle)
    return least
