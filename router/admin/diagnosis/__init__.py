"""The diagnosis: which bottleneck an overview shows, with reasons and remedy. Pure."""
