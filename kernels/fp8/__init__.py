"""Products with FP8 weights, and attention over KV memory in FP8."""
