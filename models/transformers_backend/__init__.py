"""Models of transformers' own code, with our attention and KV memory behind its attention interface."""
