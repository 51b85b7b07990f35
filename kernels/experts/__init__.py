"""Mixtures of experts: the choice of each token's experts, the experts' MLPs, and the shared expert."""
