"""The shape of KV memory, its one allocation, and its place on a NUMA node."""
