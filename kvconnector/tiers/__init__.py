"""Tiers of KV below the device: decisions without I/O, and the copies that execute them."""
