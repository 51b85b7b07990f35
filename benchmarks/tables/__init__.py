"""Tables of kept results for the documentation."""
