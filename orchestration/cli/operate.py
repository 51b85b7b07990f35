"""``splitserve pause | resume | reset-prefix-cache | profile``: operations on a running cluster over its endpoint."""

import argparse
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.option_types import whole_number
from splitserve.orchestration.cli.options import HelpFormatter

if TYPE_CHECKING:
    from splitserve.orchestration.doctor.http import Answer

T = TypeVar("T")

MODES = ("abort", "wait", "keep")
POLL_SECONDS = 0.25
ANSWER_SECONDS = 30.0
MAX_STEPS = 100_000
PROFILE_SECONDS = 60


class _Pause(msgspec.Struct):
    """Answer to a pause, a resume, and a look at either."""

    paused: bool
    mode: str | None  # of the pause, if there is one
    settled: bool
    requests_running: int
    requests_waiting: int


class _Reset(msgspec.Struct):
    """Answer to a reset: names of workers that have confirmed it, and of the others."""

    reset: list[str]
    pending: list[str]


class _WorkerProfile(msgspec.Struct):
    """Report of one worker: either is empty."""

    trace: str = ""  # the file
    error: str = ""


class _Profiles(msgspec.Struct):
    """Answer to a profile, by worker."""

    workers: dict[str, _WorkerProfile]


def add_operation_commands(commands: Any) -> None:
    """Add the commands to ``commands``, the result of :meth:`argparse.ArgumentParser.add_subparsers`."""
    pause = _add(commands, "pause", "let no new request begin until `resume`; new ones wait in the router", _pause)
    pause.add_argument(
        "--mode",
        choices=MODES,
        default="wait",
        help="fate of running requests: abort: they end with an error; wait: they finish; keep: they are frozen with "
        "their KV, and continue after `resume`",
    )
    pause.add_argument("--no-wait", action="store_true", help="return although requests still run")
    resume = _add(commands, "resume", "end a pause: waiting and frozen requests continue", _resume)
    resume.add_argument("--no-wait", action="store_true", help="return although workers are still frozen")
    _add(commands, "reset-prefix-cache", "reuse no KV that any worker has computed so far", _reset)
    profile = _add(commands, "profile", "let workers record their next steps (started with --profile-dir)", _profile)
    profile.add_argument("worker", nargs="?", default="", metavar="WORKER", help="its name; none: all workers")
    profile.add_argument("--steps", type=whole_number(1, MAX_STEPS), default=100, metavar="N", help="number of steps")
    profile.add_argument(
        "--seconds", type=whole_number(1, 600), default=PROFILE_SECONDS, metavar="S", help="longest time"
    )


def add_operators_key_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the key of the administrator's endpoints, which :func:`read_operators_key` reads."""
    parser.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help="file with the endpoint's admin key, or with its API key if it has no admin key; empty: "
        "$SPLITSERVE_ADMIN_KEY, else $SPLITSERVE_API_KEY",
    )


def _add(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=HelpFormatter
    )
    parser.add_argument("--against", default="http://127.0.0.1:8000", metavar="URL", help="endpoint of the cluster")
    add_operators_key_option(parser)
    parser.set_defaults(run=run)
    return parser


class _Operator:
    """Client of a cluster's operations. Methods raise :class:`ConfigError` with the cluster's reason for a refusal."""

    def __init__(self, options: argparse.Namespace) -> None:
        from splitserve.orchestration.doctor.http import Endpoint
        from splitserve.orchestration.spec.expansion import read_operators_key

        self._endpoint = Endpoint(options.against, read_operators_key(options.api_key_file))

    def post(self, path: str, kind: type[T], body: dict[str, Any], seconds: float = ANSWER_SECONDS) -> T:
        return self._checked(self._endpoint.post(path, body, seconds), kind)

    def get(self, path: str, kind: type[T]) -> T:
        return self._checked(self._endpoint.get(path), kind)

    def _checked(self, answer: "Answer", kind: type[T]) -> T:
        if answer.status != HTTPStatus.OK:
            raise ConfigError(f"{self._endpoint.url} answers {answer.status}: {answer.words()}")
        return self._endpoint.decoded(answer, kind)


def _pause(options: argparse.Namespace) -> int:
    state = _settled("/admin/pause", {"mode": options.mode}, options)
    if not state.paused:
        raise ConfigError("the pause has been ended by another operator, or the router was started again")
    print(f"paused ({state.mode}): {_running_words(state)}, {state.requests_waiting} wait")
    return 0


def _running_words(state: _Pause) -> str:
    """Return the number of running requests of a pause, and whether it freezes them."""
    running = f"{state.requests_running} requests"
    if state.mode != "keep":
        return f"{running} run"
    return f"{running} are frozen" if state.settled else f"{running} are being frozen"


def _resume(options: argparse.Namespace) -> int:
    state = _settled("/admin/resume", {}, options)
    if state.paused:
        raise ConfigError("the cluster has been paused again by another operator, or a router has not followed")
    print(f"not paused: {state.requests_running} requests run, {state.requests_waiting} wait")
    return 0


def _settled(path: str, body: dict[str, Any], options: argparse.Namespace) -> _Pause:
    """Pause or resume, and return the state once it has settled, or another operator has changed it; with ``--no-wait``
    at once."""
    operator = _Operator(options)
    first = state = operator.post(path, _Pause, body)
    while not (state.settled or options.no_wait) and state.paused == first.paused:
        time.sleep(POLL_SECONDS)
        state = operator.get("/admin/pause", _Pause)
    return state


def _reset(options: argparse.Namespace) -> int:
    found = _Operator(options).post("/admin/reset-prefix-cache", _Reset, {})
    print(f"reset: {', '.join(found.reset) or 'no worker'}")
    if found.pending:
        print(f"not confirmed yet: {', '.join(found.pending)}; they reset before their next request")
    return 0


def _profile(options: argparse.Namespace) -> int:
    body = {"num_steps": options.steps, "timeout_seconds": options.seconds, "worker": options.worker}
    seconds = options.seconds + 2 * ANSWER_SECONDS + POLL_SECONDS
    workers = _Operator(options).post("/admin/profile", _Profiles, body, seconds).workers
    for name, report in workers.items():
        print(f"{name}: {report.error or report.trace}")
    return 0 if any(report.trace for report in workers.values()) else 1
