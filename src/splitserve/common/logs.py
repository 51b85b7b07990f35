"""Logging of every process: one line per record on standard error, with the name of the process (the engine id)."""

import logging
import sys

LOG_LEVELS = ("debug", "info", "warning", "error")


class _OneLineFormatter(logging.Formatter):
    """Line breaks within a message become ``\\n``; a traceback keeps its lines, as it is read by people."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")


def set_up_logging(process_name: str, level: str) -> None:
    """Send this process's records to standard error; ``level`` is one of :data:`LOG_LEVELS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _OneLineFormatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name} %(name)s: %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "transformers", "uvicorn"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
