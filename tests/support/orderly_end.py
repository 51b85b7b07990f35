"""The end of a run by SIGTERM as by Ctrl-C: tests and fixtures end the processes that they have started, which would
outlive this one otherwise. Not a test module.
"""

import os
import signal

import psutil
import pytest


def end_in_order(config: pytest.Config) -> None:
    """Let SIGTERM end this process so, and processes of pytest-xdist with that which shares the tests out. Processes
    forked from it without an ``exec`` end at once, as ever."""
    run = os.getpid()

    def end(number: int, _frame: object) -> None:
        if os.getpid() != run:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, lambda *_: None)  # a second one would interrupt the end
        if config.pluginmanager.hasplugin("dsession"):
            for process in psutil.Process().children():  # which pytest-xdist would kill before all has ended
                process.send_signal(number)
        pytest.exit(f"ended by {signal.Signals(number).name}", returncode=128 + number)

    signal.signal(signal.SIGTERM, end)
