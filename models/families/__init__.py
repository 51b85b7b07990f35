"""The model families, a file each, and the registry of them."""
