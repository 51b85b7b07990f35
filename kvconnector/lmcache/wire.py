"""Messages to LMCache's multiprocess server over ZMQ: its operations, and their arguments as msgpack.

Made for and tested with LMCache 0.5.6. A request is ``[number, operation, *arguments]``, each part a msgpack value; the
response repeats the first two and adds the result, unless there is none. A request that fails has no response at all.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec


class Operation(IntEnum):
    LOOKUP = 8
    QUERY_PREFETCH_STATUS = 9
    FREE_LOOKUP_LOCKS = 12
    END_SESSION = 13
    REGISTER = 14
    UNREGISTER = 15
    PREPARE_STORE = 16
    COMMIT_STORE = 17
    PREPARE_RETRIEVE = 18
    COMMIT_RETRIEVE = 19
    CLEAR = 20
    GET_CHUNK_SIZE = 21
    PING = 22


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``start`` to ``end`` of a sequence, both on chunk boundaries, as requested by one session."""

    model_name: str
    token_ids: Sequence[int]  # the sequence's tokens, at least up to `end`
    start: int
    end: int
    request_id: str  # the session
    worker_id: int | None = 0  # None in lookups
    world_size: int = 1
    cache_salt: str = ""
    num_kv_readers: int = 1  # number of reads, or releases of the lock, of each chunk that a lookup finds


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of a chunk: to LMCache it is one slot of ``hidden_dim_size`` bytes with opaque content."""

    instance_id: int
    model_name: str
    hidden_dim_size: int
    block_size: int
    world_size: int = 1
    num_layers: int = 1
    dtype_str: str = "uint8"
    use_mla: bool = True
    num_physical_slots: int = 1


class Registered(msgspec.Struct, frozen=True):
    """Name and bytes of the shared-memory segment; "" and 0 from a server that would send pickled tensors instead."""

    shm_name: str = ""
    pool_size: int = 0


class Slot(msgspec.Struct, frozen=True):
    """Location of a chunk in the segment."""

    offset: int
    length: int


class Slots(msgspec.Struct, frozen=True):
    """Slots of a key's chunks. ``chunk_indices[i]``: the chunk of the key that belongs to ``slots[i]``; not sent for
    retrieved chunks."""

    slots: list[Slot] = []
    chunk_indices: list[int] = []


class StorePrepared(msgspec.Struct, frozen=True):
    context: Slots = Slots()


class RetrievePrepared(msgspec.Struct, frozen=True):
    success: bool
    context: Slots = Slots()


def encode_request(number: int, operation: Operation, arguments: Sequence[Any]) -> list[bytes]:
    return [msgspec.msgpack.encode(part) for part in (number, int(operation), *arguments)]


def decode_answer(frames: Sequence[bytes], kind: Any) -> tuple[int, Any]:
    """Return the request's number, and the result as ``kind``, or None if it has none.

    Raises :class:`msgspec.ValidationError` or :class:`msgspec.DecodeError` for anything else.
    """
    if len(frames) < 2:
        raise msgspec.DecodeError(f"a response of {len(frames)} parts; at least 2 are expected")
    number = msgspec.msgpack.decode(frames[0], type=int)
    return number, msgspec.msgpack.decode(frames[2], type=kind) if len(frames) > 2 else None
