"""Paged attention through FlashInfer."""
