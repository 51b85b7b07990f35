"""Demo checkpoints with random weights, and their tokenizer."""
