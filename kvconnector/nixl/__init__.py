"""Reads over NIXL and UCX: agents, links, readers, files."""
