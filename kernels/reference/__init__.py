"""Every operation in plain PyTorch: the default on CPU, and the definition that other backends are tested against."""
