"""Benches of kernels, and their tuner."""
