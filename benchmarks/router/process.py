"""Router in a process of its own, for benches: ``python -m splitserve.benchmarks.router.process CONFIG_JSON``.

Prints the fields of each step of its start as one line of JSON: the membership endpoint, then the URL.
"""

import json
import sys

import msgspec

from splitserve.protocol.config import RouterConfig
from splitserve.router.server import run_router


def _progress(_step: str, fields: dict[str, str]) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    run_router(msgspec.json.decode(sys.argv[1], type=RouterConfig), _progress)
