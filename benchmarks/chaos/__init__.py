"""Faults under load: right tokens, in time, nothing left over."""
