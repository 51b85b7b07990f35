"""The twin of a cluster: production cores of router and workers on virtual time, with models of steps and links."""
