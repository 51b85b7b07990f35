"""Reads of KV blocks from peers, whatever the transport: interface, plans, costs, staging, gathering."""
