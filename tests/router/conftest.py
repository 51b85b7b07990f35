"""Fixtures of the router's tests: routers over a small model's directory."""

from contextlib import ExitStack

import pytest

from router_harness import ready, served_router, write_model_dir
from scripted_writer import ANSWER, Writer, write_thinking_model
from splitserve.protocol.request import Role


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    return path


@pytest.fixture
def serve(model_dir):
    """Start a router with settings, get it and its workers; all ends with the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(served_router(model_dir, **settings))


@pytest.fixture(scope="package")
def served(tmp_path_factory):
    """A router with four workers that write what their script, the second value, is given."""
    path = tmp_path_factory.mktemp("scripted") / "tiny"
    writer = Writer(write_thinking_model(path))
    with served_router(path) as (router, workers):
        for name in ("m0", "m1", "m2", "m3"):
            workers.start(name, Role.MIXED, writer, max_model_len=4096, vocab_size=420)
        ready(router)
        yield router, writer


@pytest.fixture
def writer(served):
    """The script of the workers of ``served``, as at its start."""
    writer = served[1]
    writer.text, writer.num_failures = ANSWER, 0
    writer.prompts.clear()
    return writer
