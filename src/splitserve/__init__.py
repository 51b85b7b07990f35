"""Splitserve: prefill and decode of large language models on separate workers.

This package holds what every part shares; the parts themselves (``router``, ``prefill``, ``decode``,
``kvconnector``, ``kernels``, ``models``, ``orchestration``, ``benchmarks``) are the repository's top-level folders.
"""

__version__ = "0.1.0"
