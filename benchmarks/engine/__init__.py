"""Benches of the engine and its steps, with and without a device."""
