"""Times of single stages of a request with a long prompt, on the router and on a worker that has all of its KV."""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from splitserve.engine.block_manager import BlockManager
from splitserve.engine.sequence import Sequence as Request
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.tiers.commands import CopyCommand, CopyResult
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.kv_event_batch import DEVICE, KVEvent, KVEventBatch
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.requests import LocalRequest
from splitserve.protocol.request import Party, RequestKey, SamplingParams
from splitserve.protocol.token_ids import TokenIds
from splitserve.protocol.wire import decode, encode
from splitserve.router.http.parsing import parse
from splitserve.router.http.schema import CompletionRequest
from splitserve.router.placement.prefix_view import PrefixView, PromptHashes

MODEL_ID = "instant"
REPEATS = 20
_STAGE_BLOCK_SIZE = 64  # as on GPUs


def completion_body(prompt: TokenIds) -> bytes:
    body = {"model": MODEL_ID, "prompt": prompt.tolist(), "max_tokens": 1, "stream": True, "ignore_eos": True}
    return json.dumps(body).encode()


def prompt_stages(prompt: TokenIds) -> dict[str, float]:
    """Measure the median milliseconds of each stage of a prompt of token ids, in this process."""
    body, root, me = completion_body(prompt), bytes(16), Party("w", 1)
    hashes: list[bytes] = []
    extend_hashes(hashes, root, prompt[:-1], _STAGE_BLOCK_SIZE)
    prefixes = PrefixView()
    events = [KVEvent("stored", DEVICE, hashes)]
    prefixes.apply(KVEventBatch(me.engine_id, me.incarnation, 0, _STAGE_BLOCK_SIZE, root, True, events))
    known = PromptHashes(prompt)
    prefixes.matches(known)
    envelope = Envelope(me, me, LocalRequest(RequestKey("r"), prompt, SamplingParams(max_tokens=1), 60.0))
    message = encode(envelope)
    return {
        "router: body": _time_ms(lambda: parse(CompletionRequest, body)),
        "router: hashes": _time_ms(lambda: prefixes.matches(PromptHashes(prompt))),
        "router: matches again": _time_ms(lambda: prefixes.matches(known)),
        "message out": _time_ms(lambda: encode(envelope)),
        "message in": _time_ms(lambda: decode(message)),
        "worker: device hit": _hit_ms(prompt, hashes, root, in_host_tier=False),
        "worker: host tier hit": _hit_ms(prompt, hashes, root, in_host_tier=True),
    }


def _hit_ms(prompt: TokenIds, hashes: Sequence[bytes], root: bytes, *, in_host_tier: bool) -> float:
    """Measure the milliseconds from a request's tokens to its first chunk if all KV but the last block's is cached;
    copies take no time."""
    num_blocks = len(hashes) + 1
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    index = TierIndex(num_blocks)
    blocks = BlockManager(pool, _STAGE_BLOCK_SIZE, root, Tiers(pool, [Tier("host", index)]))
    contents = [(block_hash, slot) for slot, block_hash in enumerate(hashes)]
    index.adopt(contents)

    def begin() -> Request:
        sampling = SamplingParams(max_tokens=1)
        sequence = Request(RequestKey("r"), Party("router", 1), prompt[:], len(prompt), sampling, 60.0)
        blocks.would_load(sequence)
        assert blocks.reserve(sequence), "room for the whole prompt"
        for command in blocks.tiers.take_commands():
            assert isinstance(command, CopyCommand), "a copy from the host tier"
            blocks.tiers.on_result(CopyResult(command.copy_id, len(command.block_ids)))
        if sequence.load is not None:
            blocks.finish_load(sequence)
        sequence.chunk(sequence.num_remaining, _STAGE_BLOCK_SIZE)
        return sequence

    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        sequence = begin()
        seconds.append(time.perf_counter() - start)
        assert sequence.num_cached_tokens == len(hashes) * _STAGE_BLOCK_SIZE, "all of it was there"
        blocks.give_back(sequence)
        if in_host_tier:
            pool.clear_prefix_index()
    return median_ms(seconds[1:])


def _time_ms(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median_ms(seconds[1:])


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)
