"""The timeline of a request over all processes, and its views."""
