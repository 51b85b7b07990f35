"""The sampling features, a file each. Their registry is :mod:`splitserve.protocol.sampling_features`."""
