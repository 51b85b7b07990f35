"""Router of one worker, without HTTP, placement or retries."""

import math
import os
import random
import time
from array import array
from collections.abc import Sequence

import zmq

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.common.errors import ConfigError
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import Register, Registered
from splitserve.protocol.messages.requests import LocalRequest, PeerRef, RequestFailed, StepTokens, TokenDelta
from splitserve.protocol.request import Party, RequestKey, SamplingParams
from splitserve.protocol.wire import decode, encode

READY_SECONDS = 60


class DirectRouter:
    """Minimal router for a worker: accepts its registration, sends requests, records the arrival of tokens."""

    def __init__(self) -> None:
        self._party = Party("bench", os.getpid())
        self._context = zmq.Context()
        self._membership = self._context.socket(zmq.ROUTER)
        self._membership.bind("tcp://127.0.0.1:*")
        self.membership = self._membership.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._requests = self._context.socket(zmq.DEALER)
        self._worker = self._party

    def __enter__(self) -> "DirectRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self._membership.close(linger=0)
        self._requests.close(linger=0)
        self._context.term()

    def meet(self, worker: PeerRef) -> None:
        """Wait for the worker's registration and connect to it."""
        if not self._membership.poll(READY_SECONDS * 1000):
            raise ConfigError(f"no worker registered within {READY_SECONDS} s")
        identity, payload = self._membership.recv_multipart()
        assert isinstance(decode(payload).body, Register)
        self._membership.send_multipart([identity, encode(Envelope(self._party, worker.party, Registered()))])
        self._worker = worker.party
        self._requests.connect(worker.endpoint)

    def send(self, body: Body) -> None:
        self._requests.send(encode(Envelope(self._party, self._worker, body)))

    def receive(self) -> Body:
        """Return the worker's next message. Raises :class:`ConfigError` if none comes for a while."""
        if not self._requests.poll(READY_SECONDS * 1000):
            raise ConfigError(f"the worker sent nothing for {READY_SECONDS} s")
        return decode(self._requests.recv()).body

    def run(self, prompts: Sequence[list[int]], output_len: int) -> list[RequestRecord]:
        """Run all prompts at once; returns their records. Raises :class:`ConfigError` if one fails."""
        records = {f"r{index}": RequestRecord(due_seconds=0.0) for index in range(len(prompts))}
        start = time.perf_counter()
        for request_id, prompt in zip(records, prompts, strict=True):
            self._request(request_id, prompt, output_len)
        num_open = len(records)
        while num_open:
            deltas = self._deltas()
            now = time.perf_counter() - start
            for delta in deltas:
                record = records[delta.key.request_id]
                record.chunk_seconds.append(now)
                record.output_tokens += len(delta.token_ids)
                record.end_seconds = now
                num_open -= delta.finish_reason is not None
        return list(records.values())

    def joins(self, prompts: Sequence[list[int]], output_len: int, count: int) -> list[float]:
        """Send up to ``count`` newcomers one at a time while ``prompts`` run; returns each one's seconds to the first
        token."""
        for index, prompt in enumerate(prompts):
            self._request(f"s{index}", prompt, output_len)
        waiting = {f"s{index}" for index in range(len(prompts))}
        while waiting:  # until all of them decode
            waiting -= {delta.key.request_id for delta in self._deltas()}
        pauses, seconds, num_open = random.Random(0), list[float](), len(prompts)
        while len(seconds) < count and num_open == len(prompts):
            due = time.perf_counter() + pauses.uniform(0.01, 0.03)
            while (left := due - time.perf_counter()) > 0.0:
                if self._requests.poll(math.ceil(left * 1e3)):
                    num_open -= sum(delta.finish_reason is not None for delta in self._deltas())
            newcomer, sent = f"n{len(seconds)}", time.perf_counter()
            self._request(newcomer, prompts[0][:8], 1)
            while all(delta.key.request_id != newcomer for delta in self._deltas()):
                pass
            seconds.append(time.perf_counter() - sent)
        return seconds

    def _request(self, request_id: str, prompt: list[int], output_len: int) -> None:
        sampling = SamplingParams(max_tokens=output_len)
        self.send(LocalRequest(RequestKey(request_id), array("i", prompt), sampling, 600.0))

    def _deltas(self) -> Sequence[TokenDelta]:
        """Return the next tokens of any request. Raises :class:`ConfigError` for one that failed."""
        body = self.receive()
        if isinstance(body, RequestFailed):
            raise ConfigError(f"request {body.key} failed: {body.message}")
        assert isinstance(body, StepTokens)
        return body.deltas

    def heard_by_membership(self) -> list[Body]:
        """Return the messages that the worker has sent to membership since its registration was answered."""
        heard = []
        while self._membership.poll(0):
            heard.append(decode(self._membership.recv_multipart()[-1]).body)
        return heard
