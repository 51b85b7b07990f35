"""Links to workers: membership, sockets, subscriptions."""
