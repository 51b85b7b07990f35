"""Every message between processes, as typed structs: one file per conversation, one schema version.

    worker  -> membership: Register, Heartbeat, Draining, Leave  membership -> worker: Registered, RegisterRefused
    router  -> worker:     PrefillRequest, DecodeRequest, LocalRequest, Abort, Introduce, PeerGone,
                           ReadClock, Profile, SetFrozen, ResetPrefixCache, BeginDrain
    worker  -> router:     StepTokens, PromptLogprobs, RequestFailed, ClockReading, Profiled, PrefixCacheReset
    decode  -> prefill:    PeerHello, Grant, PrefixGrant, OfferAck, Release
    prefill -> decode:     PeerWelcome, PeerRefused, Offer, Withdrawn
    router  -> router:     RouterReport, SentPrefixes, AskRouter, RouterAnswer (processes on one port)

Every message travels in an :class:`~splitserve.protocol.messages.envelope.Envelope` that names the sender's
incarnation, and the receiver's if it is known. Everything is decoded strictly; see
:mod:`splitserve.protocol.wire`. Durations are relative (seconds). No
decision compares clocks of two processes; marks have the sender's clock, which the router maps to its own.
"""
