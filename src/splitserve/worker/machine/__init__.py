"""A worker's threads on the cores of its machine."""
