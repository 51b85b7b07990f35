"""Cluster specs: the document, its checks, and the configs of the processes made of it."""
