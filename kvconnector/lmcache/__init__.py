"""The tier in an LMCache server: its link, wire format, shared memory and chunks."""
