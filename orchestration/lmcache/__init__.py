"""LMCache servers of a cluster: environment, process, which ones there are."""
