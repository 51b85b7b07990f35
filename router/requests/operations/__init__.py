"""Operators' acts on the running cluster: pauses, resets of the prefix caches, drains. Pure."""
