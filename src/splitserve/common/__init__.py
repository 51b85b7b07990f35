"""Helpers of every process, without imports of other folders: errors, logs, bounded memories, cores, security."""
