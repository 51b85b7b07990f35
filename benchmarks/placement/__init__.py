"""Benches of placement: workloads replayed on the router's production core, under virtual time."""
