"""Constrained sampling: grammars, their state for each sequence, and the masks of tokens that may come next."""
