"""The hand-over protocol: two state machines, one per side and request. No I/O, no clock, no memory, no torch.

Prefill runs a :class:`.source.SourceHandover`, decode a :class:`.sink.SinkHandover`:

    sink                              source
    REQUESTED --Grant-------------->  GRANTED      decode has room for the whole prompt
    REQUESTED <------------Offer---   OFFERING     blocks whose KV is complete; cumulative, sent again until
    acknowledged
    READING   --OfferAck----------->
    (read data, then generations)
    READING   <------Offer(last)---   OFFERED      the rest, and the first token
    COMPLETE  --Release------------>  RELEASED     every block was read and verified

Either side can end it earlier: Withdrawn from prefill, Release from decode, or a lease that isn't renewed. A repeated
Grant renews the lease; prefill answers each with its current offer, so a lost message costs time, never the request.

A cache of several groups has a span of blocks for each in every offer. A hand-over is complete when the blocks of every
group are verified, and fails as a whole.

Prefill may move blocks to its host tier once all are offered: the next revision of the offer names their slots. A read
from the old locations counts only if the generations match; else the blocks are read again from the new ones.

With a :class:`splitserve.protocol.messages.handover.PrefixGrant` the same machines move blocks that a worker has
already: GRANTED goes straight to OFFERED, and the last offer has no first token, and maybe fewer blocks than
requested.

Time comes in as ``now`` (seconds of one process's monotonic clock). ``poll`` returns the actions that are due.
"""
