"""Reads of a peer's GPU memory through a mapping of it: copies by the reader's own GPU, and the wait for their end."""
