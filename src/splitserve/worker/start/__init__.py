"""Phases of a worker's start: memory, model, tiers, warm-up, registration."""
