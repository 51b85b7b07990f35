"""The option of benches that names models by their sizes."""

import argparse
from pathlib import Path

from splitserve.models.demo.published import NAMES

SHAPE_HELP = f"directories of checkpoints, whose weights aren't read, or names: {', '.join(sorted(NAMES))}"


def model_shape(text: str) -> str:
    """Return what :func:`splitserve.models.demo.published.named_config` takes: a name, or a directory with a
    config.json."""
    if text not in NAMES and not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"must be a directory with a config.json, or one of {', '.join(sorted(NAMES))}, got {text!r}"
        )
    return text
