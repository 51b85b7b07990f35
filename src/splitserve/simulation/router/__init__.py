"""The router in the simulator: its production core, driven by simulated links, timers and clients."""
