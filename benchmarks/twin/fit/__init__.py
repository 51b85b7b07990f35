"""Fits of what the twin's bench takes from measured loads: step times, links, hosts."""
