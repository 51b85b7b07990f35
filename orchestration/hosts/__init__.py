"""Processes on one machine: children, cores, GPUs, addresses, logs."""
