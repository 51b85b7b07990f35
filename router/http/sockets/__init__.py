"""Clients' sockets: connections within bounds, and answers as they are written to them."""
