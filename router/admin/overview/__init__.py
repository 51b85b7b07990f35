"""The overview of the running cluster: figures of its last half minute, from timelines and heartbeats."""
