"""Agreements between processes: identities, settings, messages, cache layout, the hand-over's state machines. Pure."""
