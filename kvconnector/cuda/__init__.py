"""GPU memory: access by peers, copies by the driver, pinned host memory."""
