"""The engine of every worker: its core, state, sequences and loop; prefill and decode are parts of it."""
