"""The model runner, on CPU and on a GPU: a step plan in, drawn tokens out."""
