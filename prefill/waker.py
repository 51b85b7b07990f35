"""Wake-ups of the engine loop by other threads and signal handlers."""

import os

_PIPE_BYTES = 4096


class Waker:
    """Lets other threads, and signal handlers, end the loop's wait."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False

    def wake(self) -> None:
        """Has no effect once closed: a second signal, or a thread that was stuck, may come late."""
        if self._is_closed:
            return
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            return  # the pipe is full: the loop wakes up anyway

    def drain(self) -> None:
        try:
            while len(os.read(self.read_fd, _PIPE_BYTES)) == _PIPE_BYTES:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._is_closed = True
        os.close(self.read_fd)
        os.close(self._write_fd)
