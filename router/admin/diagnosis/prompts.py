"""Causes on the way to the first token: too little prefill, cold prefixes, long prompts before short ones. Pure."""

from collections.abc import Iterator

from splitserve.protocol.reports.overview import Finding
from splitserve.router.admin.diagnosis.evidence import (
    BUSY_SHARE,
    MIN_LOST_SECONDS,
    TTFT,
    Evidence,
    finding,
    milliseconds,
    percent,
)

MIN_WAIT_SHARE = 0.4
MIN_MISSED_SHARE = 0.3
LONG_SHARE = 0.4
CONVOY_FACTOR = 3.0
"""Wait of short prompts over their own computation from which on others are in their way."""


def prefill_short(evidence: Evidence) -> Iterator[Finding]:
    """Prompts wait for prefill workers that have no time left."""
    wait, busy = evidence.wait, evidence.prefill_busy
    reserved = sum(worker.blocks_reserved for worker in evidence.decode)
    used = sum(worker.blocks_used for worker in evidence.decode)
    if 3 * reserved > reserved + used:  # decode holds room for prompts that wait for prefill
        wait += evidence.stage("grant_wait")
    if not evidence.has_requests or evidence.is_met(TTFT) or busy < BUSY_SHARE:
        return
    if wait < MIN_LOST_SECONDS or evidence.share(wait) < MIN_WAIT_SHARE:
        return
    tokens, speed = evidence.waiting_tokens, sum(worker.prompt_tokens_per_second for worker in evidence.prefill)
    role = evidence.prefill[0].role
    yield finding(
        "prefill_short",
        evidence.share(wait),
        f"Prefill is the bottleneck: a prompt waits {milliseconds(wait)} for its first step, "
        f"{percent(evidence.share(wait))} of its time to first token.",
        [
            f"the {len(evidence.prefill)} {role} workers run steps {percent(busy)} of the time",
            f"{tokens:,} prompt tokens wait, where {speed:,.0f} are computed per second" if tokens else "",
            f"decode workers run steps {percent(evidence.decode_busy)} of the time" if role == "prefill" else "",
        ],
        f"Add a {role} worker (`splitserve scale {role} {len(evidence.prefill) + 1}`), or send fewer or shorter "
        "prompts.",
    )


def cold_prefix(evidence: Evidence) -> Iterator[Finding]:
    """Prompts begin like earlier ones, and are computed all the same."""
    lost = evidence.missed_share * (evidence.wait + evidence.stage("prefill"))
    if not evidence.has_requests or evidence.is_met(TTFT):
        return
    if evidence.missed_share < MIN_MISSED_SHARE or lost < MIN_LOST_SECONDS:
        return
    prompts = evidence.view.prompts
    known, tokens = prompts.known_tokens or 0, max(1, prompts.tokens)
    yield finding(
        "cold_prefix",
        evidence.share(lost),
        f"Prefixes are computed again: {percent(known / tokens)} of the prompt tokens had come before, and only "
        f"{percent(prompts.cached_tokens / tokens)} were found in a cache.",
        [
            f"{evidence.missed_tokens:,} tokens were computed although an earlier prompt began with them",
            f"computing and waiting for it is {percent(evidence.share(evidence.wait + evidence.stage('prefill')))} of "
            "the time to first token",
        ],
        "Give the KV more room: a host tier (--host-kv-memory), a disk tier or LMCache, or more --kv-memory; see that "
        "prefix caching is on, and that equal prompts have the same cache_salt.",
    )


def convoy(evidence: Evidence) -> Iterator[Finding]:
    """Short prompts wait behind long ones, though there is time for all."""
    prompts = evidence.view.prompts
    wait, alone = prompts.short_wait, prompts.short_prefill_seconds
    if not evidence.has_requests or evidence.is_met(TTFT) or prompts.long_share < LONG_SHARE:
        return
    is_overloaded = evidence.prefill and evidence.prefill[0].role == "prefill" and evidence.prefill_busy > 0.95
    if is_overloaded or wait.mean < max(MIN_LOST_SECONDS, alone) or wait.p99 < CONVOY_FACTOR * alone:
        return
    yield finding(
        "long_prompts",
        wait.mean / (wait.mean + alone),
        f"Short prompts wait behind long ones: {milliseconds(wait.mean)} on average and up to "
        f"{milliseconds(wait.p99)}, where their own computation takes {milliseconds(alone)}.",
        [
            f"{percent(prompts.long_share)} of the tokens to compute belong to prompts of eight times the median "
            f"({prompts.median_tokens:,} tokens) or more; the longest has {prompts.longest_tokens:,}",
            f"prefill runs steps {percent(evidence.prefill_busy)} of the time: there is time for all",
        ],
        "Add a prefill worker, so that short prompts find one that is free, or lower --max-num-batched-tokens, so that "
        "long prompts are computed in smaller chunks.",
    )
