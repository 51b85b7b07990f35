"""A worker in the simulator: its production core, driven by a simulated loop, device, connector and tiers."""
