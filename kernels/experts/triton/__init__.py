"""Mixtures of experts as Triton kernels."""
