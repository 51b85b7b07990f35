"""``splitserve models``: the architectures that can be served, and by whose code."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from splitserve.orchestration.cli.options import HelpFormatter

TITLES = {
    "native": "Native: Splitserve's own code",
    "transformers": "Through transformers: tested; others run, too, if the proof and the test at start admit them",
    "refused": "Refused",
}


def add_models_command(commands: Any) -> None:
    """Add the command to ``commands``, the result of :meth:`argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "models",
        help="list the architectures that can be served, and by whose code",
        description="List the names that `architectures` of a checkpoint's config.json may have. `splitserve doctor "
        "MODEL` says how one checkpoint is served.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--support", choices=list(TITLES), help="only these")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run_models)


def run_models(options: argparse.Namespace) -> int:
    """Print the list."""
    from splitserve.models.catalogue import architectures

    found = [each for each in architectures() if options.support in (None, each.support)]
    if options.json:
        json.dump([asdict(each) for each in found], sys.stdout, indent=1)
        print()
        return 0
    width = max(len(each.name) for each in found)
    for support, title in TITLES.items():
        rows = [each for each in found if each.support == support]
        if rows:
            lines = (f"  {each.name:{width}}  {each.note}".rstrip() for each in rows)
            print("\n".join([f"{title} ({len(rows)})", *lines, ""]))
    return 0
