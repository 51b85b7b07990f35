"""Recordings of a running worker's steps."""
