"""A router that doesn't know what was written behind a prompt: the baseline of the case ``turns``."""

from collections.abc import Sequence

from splitserve.protocol.config import RouterConfig
from splitserve.router import server
from splitserve.router.placement.prefix_view import PromptHashes

ENTRY = f"{__name__}:run_router"


def run_router(config: RouterConfig, progress: server.Progress) -> None:
    """Serve like :func:`splitserve.router.server.run_router`, with the hashes of prompts alone."""
    PromptHashes.extended = _prompt_alone  # type: ignore[method-assign]
    server.run_router(config, progress)


def _prompt_alone(self: PromptHashes, output_ids: Sequence[int]) -> PromptHashes:  # noqa: ARG001
    return self
