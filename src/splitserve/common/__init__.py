"""What every process needs and that needs nothing of ours: errors, logs, bounded memories, cores, security."""
