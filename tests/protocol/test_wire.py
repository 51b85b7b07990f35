"""Messages as bytes: all of them come back as they went, and nothing but WireError comes out of bad bytes."""

import random
import typing
from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.common.errors import WireError
from splitserve.protocol.counters import TierLoad, WorkerLoad
from splitserve.protocol.memory_records import (
    GatherMemory,
    HostTierMemory,
    LayoutRecord,
    MappableMemory,
    MemoryKind,
    MemoryRegion,
    RankMemory,
)
from splitserve.protocol.messages.base import Message
from splitserve.protocol.messages.envelope import SCHEMA_VERSION, Body, Envelope
from splitserve.protocol.messages.handover import (
    Grant,
    GrantDelayed,
    GrantRequest,
    Offer,
    OfferAck,
    OfferedBlock,
    OfferedSpan,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    PrefixGrant,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.messages.membership import (
    Draining,
    Heartbeat,
    Leave,
    PeerLink,
    Register,
    Registered,
    RegisterRefused,
    WorkerInfo,
    WorkerSetup,
)
from splitserve.protocol.messages.operators import BeginDrain, PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import (
    Abort,
    ClockReading,
    DecodeRequest,
    FailureCode,
    HandoverReport,
    Introduce,
    LocalRequest,
    PeerGone,
    PeerRef,
    PrefillRequest,
    Profile,
    Profiled,
    PromptLogprobs,
    ReadClock,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.messages.routers import (
    AskRouter,
    PauseStamp,
    RouterAnswer,
    RouterReport,
    SentPrefixes,
    TenantUse,
    WorkerUse,
)
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.protocol.wire import MAX_MESSAGE_BYTES, OneWay, decode, encode, plain

KEY = RequestKey("cmpl-1", 2)
PROMPT = array("i", [1, 0, 2**31 - 1])
PREFILL, DECODE = Party("prefill-0", 2**63 - 1), Party("decode-0", 1)
LAYOUT = LayoutRecord("demo", "sha", "float32", 16, 2, 2, 16)
SAMPLING = SamplingParams(
    max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, seed=2**64 - 1, stop_token_ids=(1, 2), prompt_logprobs=0
)
LOGPROBS = Logprobs.of(np.array([[-0.5, -0.25]], np.float32), np.array([[9]]))
PEER = PeerRef(PREFILL, "tcp://127.0.0.1:5555")
SETUP = WorkerSetup(
    "node-7",
    "0.1.0",
    "cpu",
    [0, 1],
    2,
    4096,
    2,
    1 << 30,
    2 << 30,
    8 << 20,
    1024,
    "tcp",
    ["mlx5_0"],
    {"sample": "triton"},
)
INFO = WorkerInfo(PREFILL, Role.PREFILL, "tcp://127.0.0.1:1", 42, LAYOUT, 64, 8, 1024, 320, setup=SETUP)
REPORT = HandoverReport("prefill-0", "nixl", 3, 3072, 16, 2, 0.005)

EXAMPLES: list[Body] = [
    Register(info=INFO),
    Registered(),
    Heartbeat(
        WorkerLoad(
            num_running=3,
            resident_bytes=2**40,
            tiers=[TierLoad(name="host", slots=9, blocks=3, hits=2, load_seconds=0.5)],
        ),
        [PeerLink("p", "cma", 3e9, "slow", 12, 2**63 - 1)],
        1.8e9,
    ),
    Draining(),
    Leave(),
    PrefillRequest(KEY, PROMPT, SAMPLING, PeerRef(DECODE, "tcp://127.0.0.1:2"), 30.0, [7]),
    PrefillRequest(KEY, PROMPT, SAMPLING, PeerRef(DECODE, "tcp://127.0.0.1:2"), 30.0, prefix=PEER),
    DecodeRequest(KEY, PROMPT, SAMPLING, PEER, 30.0, [7], late_grant=True),
    LocalRequest(KEY, PROMPT, SAMPLING, 30.0),
    LocalRequest(KEY, PROMPT, SAMPLING, 30.0, [7], PEER),
    Abort(KEY),
    Introduce(PEER),
    PeerGone(DECODE),
    ReadClock(12.5),
    ClockReading(12.5, 99.25),
    Profile("p0", 128, 30.0),
    SetFrozen(True, 5),
    ResetPrefixCache(3),
    PrefixCacheReset(3),
    RouterReport(
        7,
        2,
        3,
        2,
        1,
        [WorkerUse(PREFILL, 2, 900, 700, 400, 1, 0.25, 0.5)],
        [TenantUse("team-a", 2, 5000, 1200.5)],
        PauseStamp(3, "router-1", "keep"),
        2,
        1,
    ),
    SentPrefixes(PREFILL, [b"0123456789abcdef"], 2),
    AskRouter(4, "traces", "req-1"),
    RouterAnswer(4, b"{}"),
    BeginDrain(),
    Profiled("p0", "", "/tmp/mixed.trace.json", 128, 0.9, 0.85, 0.01),
    StepTokens([TokenDelta(KEY, 4, [9], FinishReason.STOP, 16, REPORT), TokenDelta(KEY, 0, [1])]),
    StepTokens([TokenDelta(KEY, 4, [9], logprobs=LOGPROBS)]),
    StepTokens([TokenDelta(KEY, 0, [9], marks=[Mark(MarkKind.ACCEPTED, 12.5), Mark(MarkKind.CHUNK, 12.75, 512)])]),
    PromptLogprobs(KEY, 1, LOGPROBS),
    RequestFailed(KEY, FailureCode.OVERLOADED, "full \N{SNOWMAN}"),
    PeerHello(LAYOUT),
    PeerWelcome(
        LAYOUT,
        "nixl",
        [2**47 + 4096],
        [
            RankMemory(
                bytes(range(256)),
                [MemoryRegion(MemoryKind.VRAM, 1, 2**47, 64, 4096)],
                GatherMemory(MemoryRegion(MemoryKind.VRAM, 1, 2**46, 8, 1 << 20), 2**45),
                HostTierMemory(MemoryRegion(MemoryKind.DRAM, 0, 2**44, 64, 1 << 20), 2**43),
                [MappableMemory(bytes(range(64)), 1 << 21), MappableMemory(bytes(64), 0)],
            )
        ],
    ),
    PeerRefused("other dtype"),
    GrantRequest(KEY),
    GrantDelayed(KEY),
    Grant(KEY, 100, 32, 10.0),
    PrefixGrant(KEY, 2, [b"h" * 16, b"i" * 16], 10.0),
    Offer(
        KEY,
        [OfferedSpan(0, 2, [OfferedBlock(7, 2**64 - 1), OfferedBlock(8, 0)]), OfferedSpan(1, 3, [OfferedBlock(1, 5)])],
        60,
        True,
        [5],
    ),
    Offer(KEY, [OfferedSpan(0, 2, [OfferedBlock(7, 1)])], 60, True, [5], first_logprobs=[LOGPROBS]),
    OfferAck(KEY, [4, 4], False),
    Release(KEY, True),
    Withdrawn(KEY, "aborted"),
    RegisterRefused("another vocabulary"),
]


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
@pytest.mark.parametrize("to", [None, DECODE], ids=["anybody", "addressed"])
def test_round_trip(body: Body, to: Party | None) -> None:
    envelope = Envelope(PREFILL, to, body)
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_bodies_of_one_way_are_those_of_whole_messages(body: Body) -> None:
    one_way = OneWay(PREFILL, DECODE)
    data = encode(Envelope(PREFILL, DECODE, body))
    assert one_way.bodies([data]) == [body]
    assert one_way.bodies([data] * 20) == [body] * 20
    for other in (Envelope(DECODE, PREFILL, body), Envelope(PREFILL, None, body), Envelope(PREFILL, PREFILL, body)):
        assert one_way.bodies([data, encode(other)]) is None
    for broken in (data[:-1], data + b"\x00", b"SP\x00\x00" + data[4:], b"\x00" + data, b""):
        assert one_way.bodies([broken]) is None
        assert one_way.bodies([data, broken, data]) is None
    assert one_way.bodies([data + bytes(MAX_MESSAGE_BYTES)]) is None


def test_every_message_has_an_example() -> None:
    bodies = set(typing.get_args(Body))
    assert {type(example) for example in EXAMPLES} == bodies
    declared = set(Message.__subclasses__())
    assert declared == bodies, "a message is declared, but isn't in Body"


def test_every_record_forbids_what_it_does_not_know() -> None:
    """A field that one side has and the other ignores is how features get silently lost."""
    seen: set[type] = set()

    def walk(annotation: object) -> None:
        for argument in typing.get_args(annotation):
            walk(argument)
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) and annotation not in seen:
            seen.add(annotation)
            for field in msgspec.structs.fields(annotation):
                walk(field.type)

    walk(Envelope)
    assert {RequestKey, Party, SamplingParams, OfferedBlock} < seen
    assert [record.__name__ for record in seen if not record.__struct_config__.forbid_unknown_fields] == []


def raw(payload: object, version: int = SCHEMA_VERSION) -> bytes:
    return b"SP" + version.to_bytes(2, "big") + msgspec.msgpack.encode(payload)


def fields(body: Body) -> dict[str, object]:
    return typing.cast("dict[str, object]", msgspec.to_builtins(body, builtin_types=(bytes,), enc_hook=plain))


def test_another_version_is_named_before_the_rest_is_looked_at() -> None:
    with pytest.raises(WireError, match=f"schema version {SCHEMA_VERSION + 1}.*upgrade"):
        decode(b"SP" + (SCHEMA_VERSION + 1).to_bytes(2, "big") + b"\xc1 not msgpack")


@pytest.mark.parametrize("data", [b"", b"S", b"SP", b"SP\x00", b"HTTP/1.1", b"\x80\x04\x95pickle"])
def test_what_is_not_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a Splitserve message"):
        decode(data)


def test_oversized_bytes_are_refused_unread() -> None:
    with pytest.raises(WireError, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_truncated_or_trailing_bytes_are_refused(body: Body) -> None:
    data = encode(Envelope(PREFILL, DECODE, body))
    for length in range(4, len(data)):
        with pytest.raises(WireError):
            decode(data[:length])
    with pytest.raises(WireError):
        decode(data + b"\x00")


GRANT, LOCAL = (fields(next(e for e in EXAMPLES if isinstance(e, kind))) for kind in (Grant, LocalRequest))
OFFER, REGISTER = (fields(next(e for e in EXAMPLES if isinstance(e, kind))) for kind in (Offer, Register))
SENDER = ["prefill-0", 1]


@pytest.mark.parametrize(
    "payload",
    [
        [SENDER, None, GRANT | {"num_prompt_tokens": "100"}],
        [SENDER, None, GRANT | {"num_prompt_tokens": 1.5}],
        [SENDER, None, GRANT | {"num_prompt_tokens": None}],
        [SENDER, None, GRANT | {"surprise": 1}],
        [SENDER, None, {name: value for name, value in GRANT.items() if name != "key"}],
        [SENDER, None, GRANT | {"type": "Nonsense"}],
        [SENDER, None, {name: value for name, value in GRANT.items() if name != "type"}],
        [SENDER, None, GRANT | {"key": ["cmpl-1", 0, "extra"]}],
        [SENDER, None, GRANT | {"key": ["cmpl-1", "0"]}],
        [["prefill-0", 1, 2], None, GRANT],
        [["prefill-0"], None, GRANT],
        [["prefill-0", -1.5], None, GRANT],
        [SENDER, None, GRANT, "extra"],
        [SENDER, None],
        [SENDER, None, None],
        [SENDER, None, LOCAL | {"token_ids": [1, 2]}],
        [SENDER, None, LOCAL | {"token_ids": "1234"}],
        [SENDER, None, LOCAL | {"token_ids": b"\0\0\0"}],
        [SENDER, None, LOCAL | {"token_ids": {"0": 1}}],
        [SENDER, None, LOCAL | {"sampling": {"max_tokens": 0}}],
        [SENDER, None, LOCAL | {"sampling": {"max_tokens": 1, "top_p": float("nan")}}],
        [SENDER, None, LOCAL | {"sampling": {"max_tokens": 1, "temperature": float("inf")}}],
        [SENDER, None, LOCAL | {"sampling": {"max_tokens": 1, "seed": -1}}],
        [SENDER, None, LOCAL | {"sampling": {"max_tokens": 1, "best_of": 3}}],
        [SENDER, None, LOCAL | {"sampling": {"max_tokens": 1, "top_k": 2**31}}],
        [SENDER, None, LOCAL | {"token_ids": b"\0\0\0\0\xff\xff\xff\xff"}],
        [SENDER, None, LOCAL | {"deadline_seconds": float("nan")}],
        [SENDER, None, LOCAL | {"deadline_seconds": float("inf")}],
        [SENDER, None, GRANT | {"num_prompt_tokens": -1}],
        [SENDER, None, GRANT | {"lease_seconds": -0.5}],
        [SENDER, None, OFFER | {"blocks": [[-1, 0]]}],
        [SENDER, None, OFFER | {"first_tokens": [2**31]}],
        [SENDER, None, REGISTER | {"info": REGISTER["info"] | {"num_blocks": 0}}],
        {},
        [],
        7,
    ],
)
def test_wrong_types_unknown_fields_and_absurd_values_are_refused(payload: object) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode(raw(payload))


@pytest.mark.parametrize(
    "tail",
    [
        b"\xdd\xff\xff\xff\xff",  # an array that claims 4 G elements
        b"\xdf\xff\xff\xff\xff",  # a map that does
        b"\xc6\xff\xff\xff\xff",  # bytes that do
        b"\xdb\xff\xff\xff\xff",  # a string that does
        b"\x91" * 100_000,  # nested deeper than any stack
        b"\xa2\xff\xfe",  # a string that isn't UTF-8
    ],
)
def test_hostile_lengths_depths_and_strings_are_refused(tail: bytes) -> None:
    head = raw(0)[:4]
    party = msgspec.msgpack.encode(SENDER)
    body = msgspec.msgpack.encode(LOCAL | {"token_ids": b""})
    as_token_ids = body.replace(b"\xa9token_ids\xc4\x00", b"\xa9token_ids" + tail)
    as_engine_id = b"\x93\x92" + tail
    for payload in (tail, b"\x93" + tail, as_engine_id, b"\x93" + party + b"\xc0" + as_token_ids):
        with pytest.raises(WireError):
            decode(head + payload)


@given(st.integers(0, 2**32), st.sampled_from(EXAMPLES))
@settings(max_examples=400)
def test_mutated_bytes_give_a_message_or_a_wire_error(seed: int, body: Body) -> None:
    randomness = random.Random(seed)
    data = bytearray(encode(Envelope(PREFILL, DECODE, body)))
    for _ in range(randomness.randint(1, 6)):
        position = randomness.randrange(4, len(data))
        match randomness.randrange(3):
            case 0:
                data[position] = randomness.randrange(256)
            case 1:
                del data[position : position + randomness.randint(1, 4)]
            case _:
                data[position:position] = randomness.randbytes(randomness.randint(1, 8))
        if len(data) <= 4:
            break
    bodies = OneWay(PREFILL, DECODE).bodies([bytes(data)])
    try:
        envelope = decode(bytes(data))
    except WireError:
        assert bodies is None
        return
    assert bodies is None or repr(bodies) == repr([envelope.body])
    assert isinstance(envelope, Envelope)
    assert decode(encode(envelope)) == envelope or "nan" in repr(envelope)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_random_bytes_give_a_wire_error(tail: bytes) -> None:
    with pytest.raises(WireError):
        decode(raw(0)[:4] + tail)


@pytest.mark.parametrize(
    ("num_top", "values", "top_ids"), [(0, b"123", b""), (1, bytes(8), b""), (1, bytes(12), bytes(4)), (21, b"", b"")]
)
def test_log_probabilities_of_no_tokens_are_malformed(num_top: int, values: bytes, top_ids: bytes) -> None:
    good = encode(Envelope(PREFILL, DECODE, PromptLogprobs(KEY, 1, LOGPROBS)))
    header, fields = good[:4], msgspec.msgpack.decode(good[4:])
    fields[2]["logprobs"] = [num_top, values, top_ids]
    with pytest.raises(WireError, match="malformed"):
        decode(header + msgspec.msgpack.encode(fields))
