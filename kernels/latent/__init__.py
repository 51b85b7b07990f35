"""Latent attention (MLA, arXiv:2405.04434) and the operation before it, on several backends."""
