"""Tables and plots of kept results for the documentation."""
