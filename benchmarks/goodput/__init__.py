"""Goodput of arrangements of equal devices: the highest rates at which latency objectives hold, compared."""
