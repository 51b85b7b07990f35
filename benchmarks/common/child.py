"""Main of a bench's child process: runs the module that its arguments name as a program. The process ends with its
bench, however that ends: the bench holds the other end of its standard input."""

import os
import runpy
import sys
import threading
from io import FileIO


def _end_with_bench() -> None:
    # Unbuffered: a daemon thread that holds a buffered reader's lock makes the interpreter abort when it ends.
    FileIO(sys.stdin.fileno(), closefd=False).read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_bench, name="life-line", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
