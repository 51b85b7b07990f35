"""Fixtures of the router's tests: routers over a small model's directory."""

from contextlib import ExitStack

import pytest

from router_harness import served_router, write_model_dir


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
