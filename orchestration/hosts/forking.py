"""Fork servers as a launcher sees them: one per kind of child and environment, shared by all clusters of this process.

A worker of a fork server starts without the seconds of CPU time that the imports of PyTorch take, and shares the
memory of what is imported; a router that was killed is back sooner. Variables that libraries read while they are loaded
must be the server's own: workers that differ in one of them have different servers.
"""

import atexit
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from splitserve.orchestration.hosts import fork_server as fork_server_main
from splitserve.orchestration.hosts.fork_server import MAX_PACKET_BYTES, Exited, Forked, ForkOrder, Refused, Reply

# Prefixes of variables that the interpreter, PyTorch or a library of theirs reads while it is loaded. Numbers of
# threads are no such variables: a worker sets them itself.
_READ_AT_LOAD = (
    "CUDA", "GLIBC", "GOMP", "HF_", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "NUMBA", "NVIDIA", "OMP", "PATH",
    "PYTHON", "PYTORCH", "TORCH", "TRITON", "VIRTUAL_ENV",
)  # fmt: skip
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
IDLE_SECONDS = 30.0
"""Time after which a server without children ends."""
CLOSE_SECONDS = 2.0
"""Time after which a server that is closed and still imports is killed."""
LOST_STATUS = 255
"""The exit status of a child whose server ended before it."""


class ForkError(Exception):
    """Fork server that can't start a child."""


class ForkedProcess:
    """Child of a fork server, with the methods of :class:`subprocess.Popen` that its launcher needs."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.ended: Future[int] = Future()
        self._pidfd = pidfd
        self._lock = threading.Lock()  # around the use of the descriptor, which its end closes

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.ended.result()

    def send_signal(self, signal_number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock:
            if self._pidfd >= 0:
                with suppress(ProcessLookupError):  # its end has not been read yet
                    signal.pidfd_send_signal(self._pidfd, signal_number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end_when_gone(self, returncode: int) -> None:
        """Wait for the process's end, then record ``returncode`` in place of the exit status, which is lost."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        self.end(returncode)

    def end(self, returncode: int) -> None:
        """Record the exit status."""
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = -1
        self.ended.set_result(returncode)


class ForkServerLink:
    """Running fork server: its process, and the control socket to it. ``preloaded``: the module that it imports for its
    children; ``module``: the server's main."""

    def __init__(self, environment: Mapping[str, str], preloaded: str, module: str = fork_server_main.__name__) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), preloaded, str(IDLE_SECONDS)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # The threads of NumPy's library would not outlive a fork. Workers leave its products to PyTorch.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                process_group=0,
            )
        self._lock = threading.Lock()  # one request at a time
        self._ended = threading.Event()
        self._replies: queue.SimpleQueue[ForkedProcess | str] = queue.SimpleQueue()
        self._children: dict[int, ForkedProcess] = {}
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    def fork(self, order: ForkOrder, descriptors: Sequence[int]) -> ForkedProcess:
        """Start a child. Raises :class:`ForkError` with the reason if the server can't."""
        with self._lock:
            if not self.is_running():
                raise ForkError("the fork server has ended")
            try:
                socket.send_fds(self._control, [msgspec.json.encode(order)], descriptors)
            except OSError as error:
                raise ForkError(f"the fork server can't be reached: {error}") from None
            answer = self._replies.get()
        if isinstance(answer, str):
            raise ForkError(answer)
        return answer

    def is_running(self) -> bool:
        return not self._ended.is_set()

    def close(self) -> None:
        """End the server, and with it its children."""
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)
        self._reader.join(CLOSE_SECONDS)
        self._popen.kill()  # an import may hang; does nothing if it has ended
        self._reader.join()

    def let_go(self) -> None:
        """Close this process's copy of the control socket, which was inherited from the server's owner."""
        self._control.close()

    def _read(self) -> None:
        """Read replies up to the server's end. The kernel ends its children then; wait for each of them."""
        with suppress(OSError):
            while self._handle_next():
                pass
        self._ended.set()
        status = self._popen.wait()
        self._replies.put(f"the fork server ended with exit status {status}")
        with self._lock:
            self._control.close()
        for child in self._children.values():
            child.end_when_gone(LOST_STATUS)

    def _handle_next(self) -> bool:
        """Handle the next reply; returns False at the socket's end."""
        data, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        reply: Reply = msgspec.json.decode(data, type=Reply)
        match reply:
            case Forked(pid):
                self._children[pid] = ForkedProcess(pid, descriptors[0])
                self._replies.put(self._children[pid])
            case Exited(pid, returncode):
                self._children.pop(pid).end(returncode)
            case Refused(reason):
                self._replies.put(reason)
        return True


_servers: dict[object, ForkServerLink] = {}
_servers_lock = threading.Lock()


def can_fork() -> bool:
    """Return whether this platform has what a fork server needs: Linux's descriptors of processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def fork_server(environment: Mapping[str, str], preloaded: str) -> ForkServerLink:
    """Return the server for children of a module with these variables, started if there is none."""
    key = preloaded, key_of(environment)
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.is_running():
            server = _servers[key] = ForkServerLink(environment, preloaded)
        return server


def key_of(environment: Mapping[str, str]) -> object:
    """Return what children of one server have in common: variables read at load, and affinity."""
    names = [name for name in environment if name.startswith(_READ_AT_LOAD) and name not in _THREADS]
    return frozenset((name, environment[name]) for name in names), frozenset(os.sched_getaffinity(0))


def fork_child(
    environment: Mapping[str, str], folder: str, preloaded: str, descriptors: Sequence[int]
) -> ForkedProcess:
    """Start a child of the fork server that has imported the module ``preloaded``, once it has. ``folder``: the working
    directory; ``descriptors``: the child's input, output, errors and status pipe, and its listening socket if it gets
    one.

    Raises :class:`ForkError`. A second attempt is for a server that just ended because it was idle.
    """
    order = ForkOrder(dict(environment), folder)
    try:
        return fork_server(environment, preloaded).fork(order, descriptors)
    except ForkError:
        return fork_server(environment, preloaded).fork(order, descriptors)


@atexit.register
def close_fork_servers() -> None:
    """End the servers of this process, and with them their children."""
    with _servers_lock:
        for server in _servers.values():
            server.close()
        _servers.clear()


def _let_go_of_servers() -> None:
    """Leave the servers to the process from which this one was forked: they end with that one alone."""
    for server in _servers.values():
        server.let_go()
    _servers.clear()
    _servers_lock.release()


# The lock is held during a fork: another thread that held it would never release it in the forked process.
os.register_at_fork(
    before=_servers_lock.acquire, after_in_parent=_servers_lock.release, after_in_child=_let_go_of_servers
)
