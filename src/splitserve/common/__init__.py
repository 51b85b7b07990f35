"""Helpers of every process, which import no other part of Splitserve: errors, logs, bounded memories, cores, security."""
