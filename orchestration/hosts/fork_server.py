"""Main of a fork server: it has imported its children's modules, so that they need not. Started by :mod:`.forking`.

Each packet of its control socket is an order of a child, with the descriptors that the child gets. The child sets its
environment, folder and output, and continues as :func:`splitserve.orchestration.hosts.child.main`. The server reports
the ends of its children. It ends at the end of its control socket, or after a while without children.

Nothing may have happened before a fork that a child must not share: the server starts no thread and no operation on
tensors, and touches no device.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

import msgspec

from splitserve.orchestration.hosts import child

MAX_PACKET_BYTES = 1 << 20


class ForkOrder(msgspec.Struct, frozen=True):
    """Order of a child. Its packet carries descriptors: standard input, output, errors, the status pipe,
    and a listening socket for a child that gets one."""

    environment: dict[str, str]
    folder: str  # the working directory


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Child that has been started. Its packet carries a descriptor of the process."""

    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """End of a child; ``returncode`` is that of :class:`subprocess.Popen`."""

    pid: int
    returncode: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Child that could not be started."""

    reason: str


Reply = Forked | Exited | Refused
MAX_DESCRIPTORS = 5


class ForkServer:
    """Server of one control socket."""

    def __init__(self, control: socket.socket, idle_seconds: float) -> None:
        self._control = control
        self._idle_seconds = idle_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}  # of living children, by the descriptor of their process

    def serve(self) -> None:
        """Serve until the other side closes its socket, or no child has lived for ``idle_seconds``."""
        idle_since = time.monotonic()
        while self._pids or time.monotonic() - idle_since < self._idle_seconds:
            for key, _ in self._selector.select(None if self._pids else self._idle_seconds):
                if key.fileobj is not self._control:
                    self._reap(key.fd)
                elif not self._answer():
                    return
                idle_since = time.monotonic()

    def _answer(self) -> bool:
        """Start the child of the next packet; returns False at the socket's end."""
        data, descriptors, _, _ = socket.recv_fds(
            self._control, MAX_PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return False
        try:
            pid = self._fork(msgspec.json.decode(data, type=ForkOrder), descriptors)
        except OSError as error:
            self._control.send(msgspec.json.encode(Refused(str(error))))
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        socket.send_fds(self._control, [msgspec.json.encode(Forked(pid))], [pidfd])
        return True

    def _fork(self, order: ForkOrder, descriptors: list[int]) -> int:
        """Start a child; returns its process id, in this process alone. SIGINT is blocked until it ends a child without
        words, which has nothing to end in order yet."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pid = os.fork()
            if pid == 0:
                self._continue_as_child(order, descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with suppress(OSError):  # the child may have done so, and have ended
            os.setpgid(pid, pid)
        return pid

    def _reap(self, pidfd: int) -> None:
        """Report the end of a child."""
        self._selector.unregister(pidfd)
        pid = self._pids.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._control.send(msgspec.json.encode(Exited(pid, os.waitstatus_to_exitcode(status))))

    def _continue_as_child(self, order: ForkOrder, descriptors: list[int]) -> NoReturn:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the launcher alone
            self._selector.close()
            self._control.close()
            for pidfd in self._pids:
                os.close(pidfd)
            for number, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(order.environment)
            os.chdir(order.folder)
            status = self._run_child(*descriptors[3:])
        except BaseException:
            traceback.print_exc()
        finally:  # the server's own frames, further up the stack, must not continue here
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    @staticmethod
    def _run_child(status_fd: int, listener_fd: int = -1) -> int:
        """Be the child, whose descriptors are in place; returns its exit status."""
        return child.main(status_fd, listener_fd)


def serve(preloaded: str, kind: type[ForkServer] = ForkServer) -> None:
    """Import a module, then serve the control socket whose descriptor is the program's first argument. The third is the
    time in seconds after which the server ends without a child."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    gc.disable()
    importlib.import_module(preloaded)
    gc.freeze()  # the collector would otherwise copy all pages of these objects in each child
    gc.enable()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        sys.exit(f"{preloaded} started {len(threads) - 1} threads while it was imported: a fork would lose them")
    kind(control, float(sys.argv[3])).serve()
    os._exit(0)  # nothing is left to do, and PyTorch takes a third of a second to be torn down


if __name__ == "__main__":
    serve(sys.argv[2])
