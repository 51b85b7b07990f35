"""Memory of GPUs: peers' access to it, copies by the driver, pinned host memory."""
