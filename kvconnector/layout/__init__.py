"""KV memory: its one allocation, the kernels' view of it, and its NUMA node."""
