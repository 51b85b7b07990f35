"""The router's overhead over a worker that answers at once."""
