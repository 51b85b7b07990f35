"""Weights from a checkpoint's files to a rank's tensors: identity, shards, readers, scales, sizes."""
