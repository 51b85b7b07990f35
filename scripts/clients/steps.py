"""Steps of a client's program, and their outcomes. Each program runs in a virtual environment of its client."""

import json
import os
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BASE_URL = os.environ["CLIENT_TESTS_BASE_URL"]  # .../v1
MODEL = os.environ["CLIENT_TESTS_MODEL"]
CHECKPOINT = os.environ["CLIENT_TESTS_CHECKPOINT"]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"enum": ["up", "down"]}}}},
}
ONE_OF_TWO = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
found: list[dict[str, str]] = []


class NotServedError(Exception):
    """A parameter that the server refuses by name, so that a step can't run."""


@contextmanager
def step(name: str) -> Iterator[None]:
    """Note the outcome of a step: passed, failed, or not served."""
    try:
        yield
        found.append({"step": name, "outcome": "passed", "detail": ""})
    except NotServedError as error:
        found.append({"step": name, "outcome": "not served", "detail": str(error)})
    except Exception as error:
        traceback.print_exc()
        found.append({"step": name, "outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:500]})


def check(condition: object, what: object) -> None:
    """Fail the step unless ``condition`` holds."""
    if not condition:
        raise AssertionError(str(what))


def need(path: str, **parameters: Any) -> None:
    """Raise :class:`NotServedError` if the server refuses one of these parameters by name."""
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, **parameters}
    body |= {"messages": [{"role": "user", "content": "Hello"}]} if path.startswith("chat") else {"prompt": "Hello"}
    url, headers = f"{BASE_URL}/{path}", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - the server's own URL
    try:
        urllib.request.urlopen(request, timeout=120).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        refusal = json.loads(error.read())["error"]
        if error.code == 400 and str(refusal["param"]).split(".")[0] in parameters:
            raise NotServedError(refusal["message"]) from None
        raise


def end() -> None:
    """Write the outcomes to the file that the caller has named."""
    with open(os.environ["CLIENT_TESTS_OUTCOMES"], "w") as file:
        json.dump(found, file)
    sys.exit(0)
