"""A cluster of processes: supervision, its loop, its start and end."""
