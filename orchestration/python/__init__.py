"""The Python interface: clusters in this process's children, and batches of requests to them."""
