"""Clusters on Ray: controller, agents, placement groups, health."""
