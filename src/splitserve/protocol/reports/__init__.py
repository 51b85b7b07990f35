"""Reports of the router to operators, as typed data."""
