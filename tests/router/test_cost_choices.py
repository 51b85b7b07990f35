"""The policy ``cost`` chooses as a plain reading of its rules does, on random pools: its shortcuts change nothing."""

import math
import random

import msgspec
import pytest

from splitserve.protocol.placement.step_model import StepModel, StepWork, pairs
from splitserve.protocol.request import Party, Role
from splitserve.router.placement.cost import LAST_CHUNK_TOKENS, NUM_CANDIDATES, SESSION_TRUST, cost
from splitserve.router.placement.policies import (
    READ_SECONDS,
    NoWorker,
    PrefixSource,
    RequestShape,
    Snapshot,
    WorkerView,
    alone,
    fits,
    pair,
    prefix_read,
    session_rank,
)
from splitserve.router.placement.strain import MAX_CHUNK_STRAIN
from splitserve.router.placement.worker_times import MAX_UTILISATION, RESIDUAL, usual_prompt_tokens
from splitserve.router.requests.objectives import Objectives

MODELS = [
    StepModel(4e-3, 1.5e-5, 3.1e-8, 2.4e-5, 1.3e-9, 1000, saved_beside=3e-6),
    StepModel(8e-3, 3e-5, 6.2e-8, 4.8e-5, 2.6e-9, 1000),
]


class PlainCost:
    """The rules of the policy for one request, each prediction computed where it is used."""

    def __init__(self, snapshot: Snapshot, shape: RequestShape) -> None:
        self.snapshot, self.shape = snapshot, shape
        self.num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
        self.outputs = max(1.0, min(shape.max_tokens, snapshot.output_tokens))
        self.usual_outputs = max(1.0, snapshot.output_tokens)
        self.ttft, self.gap = snapshot.objectives.ttft_seconds, snapshot.objectives.tpot_seconds
        self.workers = [worker for worker in snapshot.workers if fits(worker, shape)]
        self.own = self.own_workers()

    def late(self, seconds):
        return max(0.0, seconds - self.ttft)

    def slow(self, seconds):
        return max(0.0, seconds - self.gap)

    def odds(self, seconds, objective):
        return seconds / (objective - seconds) if seconds < objective and min(self.ttft, self.gap) else math.inf

    def delay_strain(self, delay):
        return self.odds(self.shape.waited_seconds + delay, self.ttft)

    def burden(self, worker):
        return self.burden_at(worker.prefill_busy)

    def burden_at(self, utilisation):
        held = min(MAX_UTILISATION, utilisation)
        return RESIDUAL * held / (1.0 - held)

    def of(self, role):
        return [worker for worker in self.workers if worker.role is role]

    def own_workers(self):
        if not self.shape.session or any(worker.prefix_match_tokens for worker in self.workers):
            return set()
        of_roles = [workers for role in Role if (workers := self.of(role))]
        return {min(each, key=lambda worker: session_rank(self.shape.session, worker)).party for each in of_roles}

    def prompt(self, worker, read):
        """Return the delay, the time to first token, and the tokens that need no computing."""
        matched = min(worker.prefix_match_tokens, self.num_tokens - 1) if read is None else read.num_tokens
        left = self.num_tokens - matched
        steps = -(-left // worker.chunk_tokens)
        work = StepWork(prefill_tokens=left, prefill_pairs=pairs(matched, left))
        own = (steps - 1) * worker.step_model.base + worker.step_model.seconds(work)
        step = self.step_beside(worker)
        own = self.beside(worker, left, own, step)
        queue = worker.queue_seconds * self.stretch(worker, worker.prompt_seconds, step)
        queue += RESIDUAL * step
        ttft = queue + own + (0.0 if read is None else read.read_seconds)
        guessed = SESSION_TRUST * own if worker.party in self.own and worker.role is not Role.DECODE else 0.0
        return ttft + self.burden(worker) * own - guessed, ttft, matched

    def shared(self, worker, step, start):
        """Return the prompt tokens from ``start`` on that fit a step beside outputs."""
        fixed, model = worker.shared_chunk_tokens or worker.chunk_tokens, worker.step_model
        most = worker.sized_chunk_tokens or fixed
        if not self.gap:
            return fixed
        left, tokens = max(0.85 * self.gap - step, 0.4 * step), 0
        for power in reversed(range(14)):  # the most that fit, by halves
            more = tokens + (1 << power)
            if model.per_token_beside * more + model.per_pair * pairs(start, more) <= left:
                tokens = more
        tokens = min(max(1, tokens), most)
        return tokens - (tokens - fixed) % max(1, fixed // 2) if tokens > fixed else tokens

    def beside(self, worker, num_tokens, alone, step):
        """Return the seconds of a prompt beside outputs with steps of ``step`` seconds."""
        if not step:
            return alone
        chunk = self.shared(worker, step, num_tokens // 2)
        steps, steps_alone = math.ceil(num_tokens / chunk), math.ceil(num_tokens / worker.chunk_tokens)
        saved = num_tokens * worker.step_model.saved_beside
        return alone - saved + steps * step - steps_alone * worker.step_model.base

    def stretch(self, worker, alone, step):
        """Return how many times as long a prompt takes beside outputs."""
        if not alone:
            return 1.0
        num_tokens = max(1, int((alone - worker.step_model.base) / worker.step_model.per_token))
        return self.beside(worker, num_tokens, alone, step) / alone

    def share(self, worker):
        """Return the share of time that prompts will take."""
        share, prefills = worker.prompt_share, [w for w in self.snapshot.workers if w.role is Role.PREFILL]
        if worker.role is Role.PREFILL:
            decodes = [each for each in self.snapshot.workers if each.role is Role.DECODE]
            share += sum(each.prompt_share for each in decodes) / len(prefills)
        return min(MAX_UTILISATION, share)

    def context(self, worker):
        return worker.decoding_tokens + int(worker.num_decoding * self.usual_outputs / 2)

    def before(self, worker):
        work = StepWork(worker.num_decoding, self.context(worker))
        return worker.step_model.seconds(work) if worker.num_decoding else 0.0

    def step_beside(self, worker):
        """Return the seconds of the steps of outputs that are there when the prompt is computed."""
        begin_soon = self.gap and worker.num_requests and worker.role is not Role.PREFILL
        return self.before(worker) or (worker.step_model.base if begin_soon else 0.0)

    def after(self, worker):
        context = self.context(worker) + self.num_tokens + int(self.outputs / 2)
        return worker.step_model.seconds(StepWork(worker.num_decoding + 1, context))

    def gaps(self, worker):
        """Return the harm to gaps between tokens."""
        after, before = self.slow(self.after(worker)), self.slow(self.before(worker))
        harm = self.outputs * after + worker.num_decoding * self.outputs / 2 * (after - before)
        if self.gap or not any(each.num_requests for each in self.snapshot.workers):
            return harm
        return harm + self.outputs * self.interruptions(worker)

    def interruptions(self, worker):
        """Return the harm per output by prompts that are computed meanwhile, without objectives."""
        model, share = worker.step_model, self.share(worker)
        chunk = model.base + model.per_token_beside * self.shared(worker, 0.0, 0)
        return share / (1.0 - share) * min(chunk, worker.prompt_seconds or chunk)

    def chunk(self, worker, num_tokens, step):
        """Return what the last chunk of a prompt adds to a step."""
        model, chunk = worker.step_model, min(self.shared(worker, step, num_tokens), num_tokens)
        return model.per_token_beside * chunk + model.per_pair * pairs(num_tokens - chunk, chunk)

    def long_odds(self, step, chunk):
        return min(self.odds(step + chunk, self.gap), self.odds(step, self.gap) + MAX_CHUNK_STRAIN)

    def mean_odds(self, worker, step):
        """Return the mean strain of gaps, of which those beside chunks of prompts are longer."""
        share, short = self.share(worker), self.odds(step, self.gap)
        chunk = self.chunk(worker, usual_prompt_tokens(worker) or self.num_tokens, self.after(worker))
        if not (share and chunk) or short == math.inf:
            return short
        long = min(1.0, share / (1.0 - share) * step / chunk)
        return (1.0 - long) * short + long * self.long_odds(step, chunk)

    def gap_strain(self, worker):
        before, after = self.before(worker), self.after(worker)
        own = self.mean_odds(worker, after)
        if not worker.num_decoding or own == math.inf:
            return own
        each = self.mean_odds(worker, (before + after) / 2) - self.mean_odds(worker, before)
        return own + worker.num_decoding * each

    def room(self, worker):
        begun = int(worker.num_decoding * self.usual_outputs / 2)
        wanted = worker.context_tokens + begun + self.num_tokens + self.outputs
        slots = max(0, worker.num_requests + 1 - worker.max_num_seqs) / worker.max_num_seqs
        tokens = max(0.0, wanted - worker.kv_capacity_tokens) / worker.kv_capacity_tokens
        return max(slots, tokens) * self.outputs * max(self.before(worker), 1e-3)

    def best(self, workers, seconds):
        ranked = sorted(workers, key=lambda each: (seconds(each), each.num_placed, each.party.engine_id))
        return ranked[:NUM_CANDIDATES]

    def routes(self):
        """Yield each candidate's rank and placement."""
        reads = {each.party: prefix_read(self.snapshot, each, self.shape) for each in self.of(Role.PREFILL)}
        prefills = self.best(self.of(Role.PREFILL), lambda each: self.prompt(each, reads[each.party])[0])
        decodes = self.best(
            self.of(Role.DECODE), lambda each: (self.gaps(each) + self.room(each), self.gap_strain(each))
        )
        for prefill in prefills:
            for decode in decodes:
                yield self.pair(prefill, decode, reads[prefill.party])
        has_prefill = any(worker.role is Role.PREFILL for worker in self.snapshot.workers)
        for worker in self.of(Role.MIXED) + (decodes if has_prefill else []):
            yield self.alone(worker)
        spare = self.best(self.of(Role.PREFILL), lambda each: self.prompt(each, None)[0]) if decodes else []
        for worker in spare:
            if worker.context_tokens_limit >= self.shape.max_context_tokens:
                yield self.alone(worker)

    def pair(self, prefill, decode, read):
        delay, ttft, matched = self.prompt(prefill, read)
        room = self.room(decode)
        last = min(self.num_tokens - matched, LAST_CHUNK_TOKENS)
        rate = decode.link_rates.get(prefill.party.engine_id, math.inf)
        handover = READ_SECONDS + last * decode.token_bytes / rate
        delay = delay + room * (1.0 + self.burden_at(1.0))
        harm = self.late(self.shape.waited_seconds + delay) + self.slow(handover) + self.gaps(decode)
        strain = self.delay_strain(delay) + self.gap_strain(decode)
        is_away = bool(self.own) and decode.party not in self.own
        names = (prefill.party.engine_id, decode.party.engine_id)
        rank = (harm, strain, delay, False, False, is_away, prefill.num_placed + decode.num_placed, names)
        return rank, pair(prefill, decode, "", ttft + room, read=read)

    def alone(self, worker: WorkerView):
        delay, ttft, matched = self.prompt(worker, None)
        model, running, left = worker.step_model, worker.num_decoding, self.num_tokens - matched
        is_prefill = worker.role is Role.PREFILL
        before, after = self.before(worker), self.after(worker)
        beside = self.step_beside(worker)
        chunk = min(self.shared(worker, beside, matched) if beside else worker.chunk_tokens, left)
        steps = -(-left // chunk)
        work = StepWork(1.0 if before else 0.0, 0, chunk, pairs(matched, chunk))
        gap = (before or model.base) + model.seconds(work) - model.seconds(StepWork(work.num_decodes))
        delay += self.room(worker) * (1.0 + self.burden_at(1.0))
        harm = self.late(self.shape.waited_seconds + delay)
        if self.gap:
            harm += steps * running * (self.slow(gap) - self.slow(before))
            later = after + model.per_token_beside * self.shared(worker, after, 0)
            harm += worker.prefill_busy * self.outputs * (self.slow(later) - self.slow(after))
        else:
            step = before or after
            streams = running if is_prefill else min(running + 1, worker.num_requests)
            harm += steps * streams * max(0.0, gap - step) * gap / step
        harm += self.gaps(worker)
        strain = self.delay_strain(delay) + self.gap_strain(worker)
        if running and strain < math.inf:
            longer = self.long_odds(before, self.chunk(worker, self.num_tokens, before)) - self.odds(before, self.gap)
            strain += running * min(1.0, steps / self.usual_outputs) * longer
        if is_prefill:
            late, strained = self.later_prompts(worker, ttft)
            harm, strain = harm + late, strain + strained
        is_away = bool(self.own) and worker.party not in self.own
        is_local, names = worker.role is not Role.MIXED, (worker.party.engine_id,)
        rank = (harm, strain, delay, is_prefill, is_local, is_away, 2 * worker.num_placed, names)
        return rank, alone(worker, "", ttft + self.room(worker))

    def later_prompts(self, worker, ttft):
        """Return harm and strain of the prompts that are computed while the request decodes on their worker."""
        share, alone, running = self.share(worker), worker.prompt_seconds or ttft, worker.num_decoding
        if not share:
            return 0.0, 0.0
        longer = self.stretch(worker, alone, self.after(worker))
        long = 1.0 + (self.stretch(worker, alone, self.before(worker)) - 1.0) * running / (running + 1)
        mixed_step = self.after(worker) + worker.step_model.per_token_beside * self.shared(
            worker, self.after(worker), 0
        )
        seconds = self.outputs * min(self.after(worker) / (1.0 - share), mixed_step)
        number = max(1.0, seconds * share / alone)
        overload = max(0.0, share * longer - max(1.0, share * long))
        shares = [share * slower if self.gap else 0.0 for slower in (long, longer)]
        waits = [self.burden_at(max(worker.prefill_busy, each)) for each in shares]
        usual = alone * long + RESIDUAL * self.before(worker), alone * long * waits[0]
        then = alone * longer + RESIDUAL * self.after(worker) + overload * seconds / 2, alone * longer * waits[1]
        late = number * (self.mean_late(*then) - self.mean_late(*usual))
        slow, slow_usual = then[0] + 3.0 * then[1], usual[0] + 3.0 * usual[1]
        if slow >= self.ttft or not self.gap:
            return late, math.inf
        return late, number * (self.odds(slow, self.ttft) - self.odds(slow_usual, self.ttft))

    def mean_late(self, seconds, wait):
        """Return the mean of what exceeds the objective where waits are exponential, by small parts of them."""
        if seconds + 3.0 * wait <= self.ttft or not wait:
            return self.late(seconds)
        parts = [(number + 0.5) / 20_000 for number in range(20_000)]
        return sum(self.late(seconds - wait * math.log(1.0 - part)) for part in parts) / len(parts)


def pool(chosen: random.Random, num_tokens: int) -> tuple[WorkerView, ...]:
    """Return workers that are idle, busy or full, some alike in all but their names."""
    roles = chosen.choice([[Role.PREFILL, Role.DECODE], list(Role), [Role.MIXED], [Role.DECODE], [Role.PREFILL]])
    names = [f"w{number}" for number in range(chosen.choice([1, 2, 3, 9, 24]))]
    views = []
    for name in names:
        running = chosen.choice([0, 0, 1, 5, 15, 16])
        views.append(
            WorkerView(
                Party(name, 1),
                chosen.choice(roles),
                max_num_seqs=16,
                max_model_len=chosen.choice([num_tokens + 2, 10**6, 10**6, 10**6]),
                kv_capacity_tokens=chosen.choice([20_000, 400_000]),
                num_requests=running + (awaited := chosen.choice([0, 0, 1, 4])),
                context_tokens=(running + awaited) * (length := chosen.choice([100, 2000])),
                decoding_tokens=running * length,
                num_placed=chosen.choice([0, 3, 9]),
                prefix_match_tokens=chosen.choice([0, 0, 0, num_tokens // 2, num_tokens, num_tokens + 64]),
                step_model=chosen.choice(MODELS),
                chunk_tokens=chosen.choice([512, 8192]),
                shared_chunk_tokens=chosen.choice([0, 256]),
                sized_chunk_tokens=chosen.choice([0, 256, 4096]),
                queue_seconds=chosen.choice([0.0, 0.0, 0.01, 0.3, 2.0]),
                prefill_busy=chosen.choice([0.0, 0.0, 0.2, 0.6, 1.0]),
                prompt_share=chosen.choice([0.0, 0.1, 0.6]),
                prompt_seconds=chosen.choice([0.0, 0.02, 0.4]),
                num_decoding=running,
                token_bytes=1 << 17,
                link_rates={each: chosen.choice([1e10, 4e10]) for each in names if chosen.random() < 0.7},
                reads_prefixes=chosen.random() < 0.9,
            )
        )
    if chosen.random() < 0.4:
        for view in views:
            view.prefix_match_tokens = 0
    return tuple(views)


@pytest.mark.parametrize("seed", range(10))
def test_shortcuts_change_no_choice(seed: int) -> None:
    chosen = random.Random(seed)
    num_placed = 0
    for _ in range(60):
        num_tokens = chosen.choice([1, 20, 700, 6000, 15_000])
        workers = pool(chosen, num_tokens)
        holder = chosen.choice(workers)
        source = PrefixSource(holder.party, num_tokens * 2 // 3) if chosen.random() < 0.5 else None
        objectives = chosen.choice(
            [Objectives(0.0, 0.0), Objectives(0.5, 0.0), Objectives(0.5, 0.02), Objectives(0.1, 0.005)]
        )
        shape = RequestShape(num_tokens, chosen.choice([1, 64, 900]), session=chosen.choice(["", "s"]))
        shape = msgspec.structs.replace(shape, waited_seconds=chosen.choice([0.0, 0.0, 0.3]))
        snapshot = Snapshot(workers, objectives, chosen.choice([8.0, 128.0]), source)
        ranked = sorted(PlainCost(snapshot, shape).routes(), key=lambda route: route[0])
        placement = cost(snapshot, shape)
        if not ranked:
            assert isinstance(placement, NoWorker)
            continue
        num_placed += 1
        expected = ranked[0][1]
        assert not isinstance(placement, NoWorker) and placement == expected
        assert placement.matched_tokens == expected.matched_tokens
        assert placement.ttft_seconds == pytest.approx(expected.ttft_seconds, abs=1e-12)
        assert getattr(placement, "prefix", None) == getattr(expected, "prefix", None)
    assert num_placed > 15, "many pools can take the request"
