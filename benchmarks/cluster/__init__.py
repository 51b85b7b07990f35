"""Benches of clusters: start, several machines, recovery."""
