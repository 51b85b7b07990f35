"""Serving modes: aggregated or disaggregated, by what both hold."""
