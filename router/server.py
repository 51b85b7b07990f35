"""The router process: one event loop with the HTTP server, the dispatcher and its sockets. No torch in here."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from splitserve.common.collector import Collector
from splitserve.common.errors import ConfigError
from splitserve.common.listening import listen
from splitserve.common.security import is_loopback
from splitserve.protocol.config import RouterConfig
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.http.access.cross_origin import ANY_ORIGIN
from splitserve.router.http.app import Api, create_app
from splitserve.router.http.bodies.reader import BodyReader
from splitserve.router.http.endpoints.all import endpoints
from splitserve.router.http.served_model import ServedModel
from splitserve.router.http.serving import Serving
from splitserve.router.http.sockets.connections import Connections, HttpConfig
from splitserve.router.output.catalog import ResponseFormat, choose_format
from splitserve.router.placement.next_turns import Texts
from splitserve.router.requests.dispatcher import Dispatcher
from splitserve.router.text.constraints import Constraints
from splitserve.router.text.preparation import Preparation
from splitserve.router.text.processes.grammar_checker import GrammarChecker
from splitserve.router.text.processes.renderer import Renderer
from splitserve.router.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from splitserve.router.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

Progress = Callable[[str, dict[str, str]], None]

_BACKLOG = 2048
_SWITCH_SECONDS = 5e-4  # that the event loop waits for a thread that parses a large body; Python's 5 ms are felt
_LOOK_SECONDS = 10.0  # between looks whether a full pass of the garbage collector is due
_SHUTDOWN_SECONDS = 2


def run_router(config: RouterConfig, progress: Progress) -> None:
    """Serve until SIGTERM or SIGINT. Must run on the main thread of its process.

    Calls ``progress("membership", {"endpoint": ...})`` when workers can register and ``progress("listening",
    {"url": ...})`` when HTTP is accepted; then ``progress("sampling", {"defaults": ..., "source": ...})`` if the
    checkpoint has sampling defaults. Raises :class:`ConfigError` for settings that can't work, a taken port among them,
    and :class:`CheckpointError` for a model directory without a usable tokenizer.
    """
    if not config.api_key and not is_loopback(config.host):
        log.warning(
            "any client that reaches %s can use the endpoint: set SPLITSERVE_API_KEY or --api-key-file, unless a proxy "
            "in front of it asks for credentials",
            config.host,
        )
    _allow_many_files()
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Threads for each text of a batch cost more than they save, and their cores belong to the workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with listening_socket(config.host, config.port, config.listener_fd) as listener:
        tokenizer = ModelTokenizer(Path(config.model), config.chat_template)
        defaults = read_sampling_defaults(config.generation_config, Path(config.model))
        response_format = _response_format(config, tokenizer)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(config, progress, listener, tokenizer, defaults=defaults, response_format=response_format)
            )


def _allow_many_files() -> None:
    """Raise the soft limit on file descriptors to the hard one: it is often 1024, and each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _response_format(config: RouterConfig, tokenizer: ModelTokenizer) -> ResponseFormat | None:
    """Return the form of the model's output, and log it. Raises as :func:`choose_format` does."""
    source = tokenizer.chat_template.source if tokenizer.chat_template is not None else None
    found = choose_format(config.response_template, source, tokenizer.response_template, config.model)
    if found is not None:
        log.info("reasoning and tool calls are read by the response template %s", found.where)
    elif source is not None:
        log.info("no response template fits this model: answers are content only (--response-template sets one)")
    return found


async def _serve(
    config: RouterConfig,
    progress: Progress,
    listener: socket.socket,
    tokenizer: ModelTokenizer,
    *,
    defaults: SamplingDefaults,
    response_format: ResponseFormat | None,
) -> None:
    local_only = is_loopback(config.host) and not (config.api_key or config.tenants_file)
    _check_origins(config, local_only=local_only)
    metrics = RouterMetrics(config.served_model_name, config.name if config.peers else "")
    dispatcher = Dispatcher(config, metrics)
    renderer = Renderer(tokenizer.chat_template)
    checker = GrammarChecker(Path(config.model), tokenizer.eos_token_ids)
    preparation = Preparation(
        tokenizer, renderer, Constraints(checker, tokenizer.eos_token_ids), defaults, response_format
    )
    bodies = BodyReader(config.max_body_mib << 20, dispatcher.turns)
    try:
        _follow_tenants(dispatcher)
        dispatcher.core.next_turns.texts = Texts(tokenizer.decode, frozenset(tokenizer.added_ids.values()))
        preparation.start()
        await renderer.start()
        progress("membership", {"endpoint": dispatcher.fleet.endpoint})
        serving = Serving(ServedModel(_names(config), defaults), dispatcher, preparation, bodies)
        app = create_app(
            Api(serving, metrics),
            metrics,
            (config.api_key, config.admin_key),
            local_only=local_only,
            allowed_origins=config.allowed_origins,
            more_posts=endpoints(serving),
        )

        def announce() -> None:
            progress("listening", {"url": _url(listener)})
            if defaults.values:
                progress("sampling", {"defaults": defaults.describe(), "source": defaults.source})

        connections = Connections(config.http, config.max_requests_in_flight, metrics)
        dispatcher.overviews.clients = connections
        server = _HttpServer(_http_config(app, connections), on_started=announce)

        def stop() -> None:
            # Open streams get their error event first: afterwards the server waits for no request.
            dispatcher.close()
            server.should_exit = True

        _on_end(stop)
        await dispatcher.exchange.catch_up()
        async with _collecting(dispatcher):
            await server.serve(sockets=[listener])
    finally:
        dispatcher.close()
        dispatcher.reports.tracing.close()
        bodies.close()
        preparation.close()
        renderer.close()
        checker.close()


def _on_end(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the process is asked to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _names(config: RouterConfig) -> tuple[str, ...]:
    """Return the ids of the model, the first of them its own."""
    return tuple(dict.fromkeys((config.served_model_name, *config.aliases)))


def _follow_tenants(dispatcher: Dispatcher) -> None:
    """Read the file of tenants now, and again at each SIGHUP. Raises :class:`ConfigError` for a faulty one now."""
    dispatcher.load_tenants()
    dispatcher.exchange.reload_tenants = lambda: _reload_tenants(dispatcher)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _on_hang_up, dispatcher)


def _on_hang_up(dispatcher: Dispatcher) -> None:
    _reload_tenants(dispatcher)
    dispatcher.exchange.tell_tenants_changed()


def _reload_tenants(dispatcher: Dispatcher) -> None:
    """Read the file of tenants again; a faulty one leaves the tenants as they are."""
    try:
        dispatcher.load_tenants()
    except ConfigError as error:
        log.error("the tenants stay as they were: %s", error)
    else:
        log.info("%d tenants are known", len(dispatcher.tenants.by_name) - 1)


@contextlib.asynccontextmanager
async def _collecting(dispatcher: Dispatcher) -> AsyncIterator[None]:
    """Keep the pauses of the garbage collector short."""
    collector = Collector()
    collector.start()
    looking = asyncio.create_task(_look_often(collector, dispatcher))
    try:
        yield
    finally:
        looking.cancel()
        collector.stop()


async def _look_often(collector: Collector, dispatcher: Dispatcher) -> None:
    requests = dispatcher.core.requests
    while True:
        num_begun = requests.num_begun
        await asyncio.sleep(_LOOK_SECONDS)
        collector.look(is_idle=not len(requests) and requests.num_begun == num_begun)


def _check_origins(config: RouterConfig, *, local_only: bool) -> None:
    if local_only and ANY_ORIGIN in config.allowed_origins:
        raise ConfigError(
            "--allowed-origins '*' lets every web page that a user of this machine visits use the endpoint: name the "
            "origins, or set an API key (--api-key-file)"
        )


def _http_config(app: ASGIApp, connections: Connections) -> HttpConfig:
    return HttpConfig(
        app,
        connections,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling, and with a callback once it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def listening_socket(host: str, port: int, shared_fd: int = -1) -> socket.socket:
    """Return a socket that listens on the address, or the one that the router shares with others (``shared_fd``).
    Raises :class:`ConfigError`."""
    return listen(host, port) if shared_fd < 0 else socket.socket(fileno=shared_fd)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
