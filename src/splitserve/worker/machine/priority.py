"""Priority of a worker's process on the cores that it shares with the router and its clients."""

import os

import torch

NICE_LEVELS_ON_CPU = 2
"""Steps below the router: with them the router, which runs for a tenth of a millisecond at a time, need not wait until
a step's threads have had their slice; without the router's and others' load the worker loses nothing."""


def give_way(device: torch.device) -> None:
    """Lower this process's priority a little if it computes on the CPU, where its threads keep the cores busy."""
    if device.type == "cpu":
        os.nice(NICE_LEVELS_ON_CPU)
