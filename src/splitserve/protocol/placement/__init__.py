"""Placement in terms that all processes share: the names of policies, models of step times."""
