"""Tensor parallelism: collectives of ranks on CPU and on GPUs."""
