"""Hostile HTTP clients and bodies beside a stream."""
