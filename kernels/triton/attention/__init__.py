"""Paged attention as Triton kernels, and what comes between the projection and it."""
