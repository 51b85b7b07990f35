"""Processes that tests read KV from, forked from a server that has imported PyTorch and NIXL. Not a test module.

A process that is spawned imports them anew, which takes seconds of CPU time.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_context() -> ForkServerContext:
    """Return the context of such processes. They have the environment of the first one's start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["splitserve.kvconnector.nixl.connector", "splitserve.worker.ranks.process"])
    return context
