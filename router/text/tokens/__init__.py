"""Tokens of texts and texts of tokens at little cost: caches in front of the tokenizer, exact by construction."""
