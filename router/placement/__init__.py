"""Placement of requests on workers: pure policies over a snapshot, and what they look at."""
