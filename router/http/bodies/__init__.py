"""Bodies of requests: read within bounds, measured before they are parsed, and refused in plain words."""
