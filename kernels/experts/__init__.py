"""Mixtures of experts: the choice of each token's experts, and the experts' MLPs."""
