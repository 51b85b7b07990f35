"""The engine's sockets."""
