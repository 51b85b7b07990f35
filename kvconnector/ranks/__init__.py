"""Transfers of a tensor-parallel worker: each rank moves its own heads, rank 0 coordinates."""
