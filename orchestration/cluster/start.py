"""Wait for a starting cluster: the end of any process, or a request to stop, fails the start."""

import time
from collections.abc import Callable

from splitserve.orchestration.cluster.children import Children
from splitserve.orchestration.cluster.host import Asked, ChildExited, ChildProgress, Event, StopRequested
from splitserve.orchestration.cluster.launch_errors import LaunchError, LaunchInterruptedError
from splitserve.orchestration.cluster.router_keeper import probe_ready
from splitserve.orchestration.control.requests import AnyReply, AnyRequest, GetStatus, Refused, Stop
from splitserve.orchestration.lmcache.keeper import is_lmcache
from splitserve.orchestration.spec.expansion import ROUTER

_READY_POLL_SECONDS = 0.05


class ClusterStart:
    """Loop over events until an awaited condition holds. Raises :class:`LaunchError` or
    :class:`LaunchInterruptedError`. ``next_event(until)`` does what is due, and returns the next event; None if
    something else is due, or the time has come, before it arrives."""

    def __init__(
        self,
        next_event: Callable[[float], Event | None],
        children: Children,
        note_progress: Callable[[ChildProgress], None],
        reply: Callable[[AnyRequest], AnyReply],
        not_ready: Callable[[], list[str]],
    ) -> None:
        self._next_event = next_event
        self._children = children
        self._note_progress = note_progress
        self._reply = reply
        self._not_ready = not_ready

    def wait(self, condition: Callable[[], bool], awaited: str, deadline: float) -> None:
        """Take events until ``condition()``; ``awaited`` describes it for the error message."""
        while not condition():
            event = self._next_event(deadline)
            if event is not None:
                self._handle(event)
            elif time.monotonic() >= deadline:
                missing = ", ".join(self._not_ready()) or ROUTER
                raise LaunchError(f"gave up waiting for {awaited}; not ready: {missing}")

    def wait_for_router(self, url: str, deadline: float) -> None:
        """Take events until the router reports that it can serve."""
        answer = "no answer"
        while time.monotonic() < deadline:
            ready, answer = probe_ready(url)
            if ready:
                return
            event = self._next_event(time.monotonic() + _READY_POLL_SECONDS)
            if event is not None:
                self._handle(event)
        raise LaunchError(f"all workers are ready, but the router is not: GET {url}/ready gives {answer}")

    def _handle(self, event: Event) -> None:
        match event:
            case StopRequested(reason):
                raise LaunchInterruptedError(f"{reason} before the cluster was ready")
            case ChildExited(name, returncode):
                child = self._children.by_name[name]
                raise LaunchError(f"{name}: {child.describe_exit(returncode)}")
            case ChildProgress(name, "down", {"reason": reason}) if is_lmcache(name) and name in self._not_ready():
                raise LaunchError(
                    f"{name}: its server {reason}; the log of {name} has the server's own messages, if it wrote any: "
                    "mend what they name, or start without the part lmcache of the spec"
                )
            case ChildProgress() as progress:
                self._note_progress(progress)
            case Asked(request, answer):
                starting = Refused("the cluster is still starting: wait until `splitserve status` shows serving")
                answer(self._reply(request) if isinstance(request, GetStatus | Stop) else starting)
