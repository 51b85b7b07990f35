"""Requests from admission to their end: attempts, failures, waiting, deadlines."""
