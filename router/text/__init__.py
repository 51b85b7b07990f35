"""Text to tokens and back: chat templates, tokenizer, detokenisation, stop strings."""
