"""Benches of serving over HTTP: load, latency, isolation, soak."""
