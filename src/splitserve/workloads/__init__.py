"""Workloads of benches and of the simulator: conversations, their arrivals and lengths. Pure, seeded."""
