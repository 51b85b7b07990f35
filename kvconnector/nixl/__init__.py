"""Reads over NIXL and UCX: agents, connections, readers, files."""
