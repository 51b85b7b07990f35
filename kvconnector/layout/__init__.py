"""KV memory: its shape, its one allocation, and its NUMA node."""
