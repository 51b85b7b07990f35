"""Numbers and bytes of messages, within bounds that hold for every sender: no receiver has to think of negative sizes,
or of durations that are NaN."""

from typing import Annotated, TypeAlias

import msgspec

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
BlockHash: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
Unsigned: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]  # up to 2**64 - 1, by msgpack's own bound

MAX_TOP_LOGPROBS = 20
"""The largest number of alternatives in a token's log-probabilities."""
NumTop: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
