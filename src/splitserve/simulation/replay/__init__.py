"""Replay of workloads on the production router core, under virtual time; workers are paced by step-time models."""
