"""What processes agree on: identities, settings, messages, the hand-over's state machines. Pure."""
