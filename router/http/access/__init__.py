"""Access to the server: API key, pages of other origins, types of bodies."""
