"""Splitserve: prefill and decode of large language models on separate workers.

This package holds what every part shares; the parts themselves (``router``, ``prefill``, ``decode``,
``kvconnector``, ``kernels``, ``models``, ``orchestration``, ``benchmarks``) are the repository's top-level folders.
"""

__version__ = "0.1.0"

_PYTHON = {
    "LLM": "llm",
    "Server": "server",
    "launch": "server",
    "ChatCompletion": "results",
    "Completion": "results",
    "Output": "results",
    "PromptError": "results",
    "ToolCall": "results",
    "Usage": "results",
}
"""Names of the Python interface, and their modules. ``__init__.pyi`` has them for type checkers."""


def __getattr__(name: str) -> object:
    """Import a name of the Python interface at its first use: ``import splitserve`` alone stays cheap."""
    if name not in _PYTHON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"splitserve.orchestration.python.{_PYTHON[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PYTHON})
