"""Server of the client tests: a demo checkpoint on a prefill and a decode worker, until standard input ends.

The first line of output is JSON with its URL, its model id and its checkpoint.
"""

import json
import sys
import tempfile
from pathlib import Path

import splitserve
from splitserve.models.demo.checkpoint import write_demo_model

TEMPLATE = Path(__file__).parent / "tools.jinja"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="splitserve-clients-") as folder:
        model = write_demo_model(Path(folder) / "demo-model")
        with splitserve.launch(
            model,
            prefill=1,
            decode=1,
            dtype="float32",
            kv_memory="128MiB",
            max_model_len=4096,
            chat_template=str(TEMPLATE),  # the demo checkpoint's own has no place for tools
            response_template="hermes",
        ) as server:
            facts = {"base_url": server.base_url, "model": server.model, "checkpoint": str(model)}
            print(json.dumps(facts), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
