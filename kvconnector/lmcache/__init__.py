"""The tier in an LMCache server: its connection, wire format, shared memory and chunks."""
