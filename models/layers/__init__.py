"""Layers of decoders: each declares its weights once and runs on the operations of the kernels."""
