"""Benches of KV: hand-overs and tiers."""
