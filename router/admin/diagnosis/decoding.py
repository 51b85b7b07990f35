"""Causes on decode workers: no room for prompts, steps that are too slow for the objective. Pure."""

from collections.abc import Iterator
from statistics import mean

from splitserve.protocol.reports.overview import Finding
from splitserve.router.admin.diagnosis.evidence import (
    BUSY_SHARE,
    MIN_LOST_SECONDS,
    MIN_REQUESTS,
    TPOT,
    TTFT,
    Evidence,
    finding,
    milliseconds,
    percent,
)

FULL_SHARE = 0.8
MIN_GRANT_SHARE = 0.25
FULL_BATCH_SHARE = 0.9
MIN_BATCH = 4


def decode_kv(evidence: Evidence) -> Iterator[Finding]:
    """Prompts wait for the grant: decode has no KV memory for them."""
    wait = evidence.stage("grant_wait")
    if evidence.prefill_busy < BUSY_SHARE:
        wait += evidence.stage("queue")  # the router keeps requests back while workers are full
    if not evidence.has_requests or evidence.is_met(TTFT) or not evidence.decode:
        return
    if wait < MIN_LOST_SECONDS or evidence.share(wait) < MIN_GRANT_SHARE:
        return
    blocks = sum(worker.blocks for worker in evidence.decode)
    held = sum(worker.blocks_used + worker.blocks_reserved for worker in evidence.decode)
    reserved = sum(worker.blocks_reserved for worker in evidence.decode)
    fullest = max(worker.max_used_share for worker in evidence.decode)
    if fullest < FULL_SHARE:
        return
    empty = reserved / held if held else 0.0
    how = f"{percent(empty)} of what is in use is reserved and empty" if empty >= 0.25 else ""
    yield finding(
        "decode_kv",
        evidence.share(wait),
        f"Decode has no KV memory left: a prompt waits {milliseconds(wait)} for room there, "
        f"{percent(evidence.share(wait))} of its time to first token.",
        [
            f"up to {percent(fullest)} of a decode worker's KV blocks were in use, {percent(held / blocks)} of all now",
            how,
            f"prefill runs steps {percent(evidence.prefill_busy)} of the time",
        ],
        f"Give decode more KV memory (--kv-memory), or add a decode worker (`splitserve scale "
        f"{evidence.decode[0].role} {len(evidence.decode) + 1}`).",
    )


def batch_too_big(evidence: Evidence) -> Iterator[Finding]:
    """Decode steps with many sequences take longer than the objective allows."""
    objective = next((each for each in evidence.view.objectives if each.name == TPOT), None)
    itl = evidence.view.itl
    running = [worker for worker in evidence.decode if worker.step_sequences > 0]
    if objective is None or itl.num < MIN_REQUESTS or itl.mean <= objective.seconds or evidence.is_met(TPOT):
        return
    batch = mean(worker.step_sequences for worker in running) if running else 0.0
    step = mean(worker.step_seconds for worker in running) if running else 0.0
    if batch < MIN_BATCH or step < 0.7 * objective.seconds:
        return
    yield finding(
        "batch_too_big",
        (itl.mean - objective.seconds) / itl.mean,
        f"Decode batches are too big for the objective: a token takes {milliseconds(itl.mean)} where "
        f"{milliseconds(objective.seconds)} are wanted.",
        [
            f"a step has {batch:.0f} sequences and takes {milliseconds(step)}",
            f"{objective.num_met} of {objective.num} requests met the objective",
        ],
        f"Add a decode worker (`splitserve scale {evidence.decode[0].role} {len(evidence.decode) + 1}`), or lower "
        "--max-num-seqs, so that further requests wait instead.",
    )


def decode_slots(evidence: Evidence) -> Iterator[Finding]:
    """Sequences wait for room in decode's batch, whose size is bounded."""
    full = [worker for worker in evidence.decode if worker.num_running >= FULL_BATCH_SHARE * worker.max_num_seqs]
    queue = next((each.times.mean for each in evidence.view.handover_stages if each.name == "decode_queue"), 0.0)
    if evidence.prefill_busy < BUSY_SHARE:
        queue += evidence.stage("queue")
    lost = min(1.0, queue / (queue + evidence.view.ttft.mean)) if queue else 0.0
    if not evidence.has_requests or len(full) < len(evidence.decode) or queue < MIN_LOST_SECONDS or lost < 0.25:
        return
    yield finding(
        "decode_slots",
        lost,
        f"Decode's batches are full: a sequence waits {milliseconds(queue)} for room.",
        [f"{worker.engine_id} decodes {worker.num_running} of {worker.max_num_seqs} sequences" for worker in full[:3]],
        f"Raise --max-num-seqs, or add a decode worker (`splitserve scale {evidence.decode[0].role} "
        f"{len(evidence.decode) + 1}`).",
    )
