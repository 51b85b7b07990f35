"""The worker's process: from its config to a running engine."""
