"""Other router processes on the same port: what they have in flight, and the exchange with them."""
