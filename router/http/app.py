"""The HTTP interface: OpenAI's endpoints, health, readiness, metrics. Errors have OpenAI's shape, unless an endpoint
gives them another one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve import __version__
from splitserve.router.admin.cluster_report import cluster_report
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.admin.overview.dashboard import dashboard
from splitserve.router.admin.profiles import MAX_PROFILE_BODY_BYTES, parse_profile_request
from splitserve.router.http.access.api_key import RequireKey
from splitserve.router.http.access.content_type import check_json
from splitserve.router.http.access.cross_origin import allow_origins
from splitserve.router.http.access.local_origin import RequireLocal
from splitserve.router.http.access.refusals import Refusals, internal_error
from splitserve.router.http.access.request_id import GiveRequestIds, arrival_of, request_id_of
from splitserve.router.http.api_error import ApiError, error_of_refusal
from splitserve.router.http.formats import ChatFormat, ChoicesFormat, CompletionFormat
from splitserve.router.http.openapi import openapi_document
from splitserve.router.http.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from splitserve.router.http.serving import Serving
from splitserve.router.peers.sums import joined_metrics
from splitserve.router.placement.placer import Limits
from splitserve.router.requests.operations.pause import PAUSED
from splitserve.router.requests.operations.refusal import OperationRefusedError
from splitserve.router.requests.queue.tenants import Tenants
from splitserve.router.text.preparation import check_not_empty

_CLOSED_TRANSPORT = "the handler is closed"  # uvloop's message between a connection's reset and its report of the reset

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


class Api:
    """The endpoints' handlers, for one model."""

    def __init__(self, serving: Serving, metrics: RouterMetrics) -> None:
        self._serving = serving
        self.served_model = serving.model
        self.tracing = serving.dispatcher.reports.tracing
        self.writes_lines = serving.dispatcher.config.request_log
        self._dispatcher = serving.dispatcher
        self._metrics = metrics
        self._bodies = serving.bodies

    async def completions(self, request: Request) -> Response:
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, CompletionRequest)
        check_not_empty(body)
        return await self._serving.generate(
            request,
            body,
            num_bytes,
            self._format(CompletionFormat, body, request),
            lambda limits: self._serving.preparation.completion(body, limits),
            arrived_at=arrived_at,
            count=len(body.prompts()),
        )

    async def chat_completions(self, request: Request) -> Response:
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, ChatCompletionRequest)
        return await self._serving.generate(
            request,
            body,
            num_bytes,
            self._format(partial(ChatFormat, stop_token_ids=body.stop_token_ids), body, request),
            lambda limits: self._serving.preparation.chat(body, limits),
            arrived_at=arrived_at,
        )

    def tenants(self) -> Tenants:
        """Return the tenants as they are now."""
        return self._dispatcher.tenants

    def _format(self, kind: Callable[..., ChoicesFormat], body: GenerationRequest, request: Request) -> ChoicesFormat:
        return kind(
            self.served_model.name(body.model),
            include_usage=body.include_usage,
            return_token_ids=bool(body.return_token_ids),
            request_id=request_id_of(request),
        )

    async def models(self, _request: Request) -> Response:
        return JSONResponse(self.served_model.page(self._max_model_len()))

    async def model(self, request: Request) -> Response:
        name = self.served_model.name(request.path_params["model_id"])
        return JSONResponse(self.served_model.card(name, self._max_model_len()))

    def _max_model_len(self) -> int | None:
        limits = self._dispatcher.core.placer.limits(time.monotonic())
        return limits.max_model_len if isinstance(limits, Limits) else None

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        if self._dispatcher.core.pause.is_on:
            return JSONResponse({"status": "not ready", "reason": PAUSED}, 503)
        readiness = self._dispatcher.readiness()
        reason = {"reason": readiness.reason} if readiness.reason else {}
        if readiness.is_ready:
            return JSONResponse({"status": "ready", **reason})
        return JSONResponse({"status": "not ready", **reason}, 503)

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, _request: Request) -> Response:
        text = self._metrics.render()
        others = await self._dispatcher.exchange.ask("metrics")
        if others:
            text = joined_metrics(text, others.values())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(self, _request: Request) -> Response:
        """Answer with all that is known of the cluster, for the search for faults (``splitserve doctor``)."""
        self._dispatcher.fleet.mend_links()  # a link still broken in the next answer doesn't mend by itself
        fleet, rates = self._dispatcher.fleet, await self._dispatcher.rates()
        report = cluster_report(self._dispatcher.config, fleet, rates, asyncio.get_running_loop().time())
        return Response(msgspec.json.encode(report), media_type="application/json")

    async def overview(self, _request: Request) -> Response:
        """Answer with figures of the last half minute and the bottleneck that they show (the dashboard)."""
        overview = self._dispatcher.overviews.overview()
        num_others = len(self._dispatcher.core.peers.reports)
        if num_others:
            rates = await self._dispatcher.rates()
            overview = msgspec.structs.replace(overview, rates=rates, num_routers=1 + num_others)
        return Response(msgspec.json.encode(overview), media_type="application/json")

    async def pause_state(self, _request: Request) -> Response:
        return JSONResponse(self._dispatcher.operations.state())

    async def request_traces(self, request: Request) -> Response:
        """Answer with the timelines of ended requests whose ids begin with the given one (``splitserve trace``)."""
        traces = await self._dispatcher.traces(request.path_params["request_id"])
        if not traces.traces:
            raise ApiError(404, "no request of the last ones has this id", code="not_found", param="request_id")
        return Response(msgspec.json.encode(traces), media_type="application/json")

    async def profile(self, request: Request) -> Response:
        """Let the workers record their next steps, and answer when their reports are complete."""
        check_json(request)
        async with self._bodies.read(request, MAX_PROFILE_BODY_BYTES) as content:
            body = parse_profile_request(content)
        try:
            reports = await self._dispatcher.profiles.take(body.num_steps, body.timeout_seconds, body.worker)
        except OperationRefusedError as refusal:
            raise error_of_refusal(refusal) from refusal
        if not reports:
            raise ApiError(503, "no worker is ready: try again", code="no_worker")
        return JSONResponse({"workers": reports})


def create_app(
    api: Api,
    metrics: RouterMetrics,
    keys: tuple[str, str] = ("", ""),
    *,
    local_only: bool = False,
    allowed_origins: Collection[str] = (),
    more_posts: Sequence[tuple[str, Handler]] = (),
) -> ASGIApp:
    """Return the ASGI application: routes, errors in OpenAI's shape, request counts.

    ``keys``: the API key, which protects /v1 and /admin, and the admin key, which protects /admin in its place; "" for
    none. With ``local_only``, Host must name a loopback host, and Origin one as well or one of ``allowed_origins``,
    whose pages may read the answers. ``more_posts``: paths of further endpoints, and their
    handlers.
    """
    document = msgspec.json.encode(openapi_document(api.served_model.names, wants_key=bool(keys[0])))

    async def openapi(_request: Request) -> Response:
        return Response(document, media_type="application/json")

    posts: list[tuple[str, Handler]] = [
        ("/v1/completions", api.completions),
        ("/v1/chat/completions", api.chat_completions),
        ("/admin/profile", api.profile),
        *more_posts,
    ]
    gets: list[tuple[str, Handler]] = [
        ("/v1/models", api.models),
        ("/v1/models/{model_id:path}", api.model),
        ("/health", api.health),
        ("/ready", api.ready),
        ("/version", api.version),
        ("/metrics", api.metrics),
        ("/admin/workers", api.workers),
        ("/admin/overview", api.overview),
        ("/admin/pause", api.pause_state),
        ("/dashboard", dashboard),
        ("/admin/requests/{request_id}", api.request_traces),
        ("/openapi.json", openapi),
    ]
    routes: list[BaseRoute] = [Route(path, handler, methods=["POST"]) for path, handler in posts]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in gets]
    refusals = Refusals(writes_lines=api.writes_lines)
    # Plain routes: FastAPI's own would parse and validate, which the handlers do. The document is written by hand.
    app = FastAPI(
        title="Splitserve", version=__version__, openapi_url=None, routes=routes, exception_handlers=refusals.handlers()
    )
    paths = frozenset(path for path, _ in posts + gets)
    by_path = {("POST", path): handler for path, handler in posts if "{" not in path}
    by_path |= {("GET", path): handler for path, handler in gets if "{" not in path}
    exact = ExactPaths(app, by_path, refusals)
    guarded: ASGIApp = RequireKey(exact, *keys, api.tenants, local_only=local_only)
    shared = allow_origins(guarded, allowed_origins)
    local = RequireLocal(shared, allowed_origins) if local_only else shared
    return GiveRequestIds(CountRequests(local, metrics, paths), api.tracing)


class ExactPaths:
    """ASGI application that calls the handlers of exact paths itself: the way through the framework costs more than the
    rest of a short request's HTTP. All other requests go to ``rest``, and so do the errors of the routing."""

    def __init__(self, rest: ASGIApp, handlers: Mapping[tuple[str, str], Handler], refusals: Refusals) -> None:
        self._rest = rest
        self._refusals = refusals
        self._handlers = handlers  # by method and path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._rest(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except ApiError as error:
            response = await self._refusals.on_api_error(request, error)
        except ClientDisconnect as error:
            response = await self._refusals.on_client_disconnect(request, error)
        await response(scope, receive, send)


class CountRequests:
    """ASGI middleware that counts requests by endpoint (of ``paths``, else "other") and status. A bug that ends a
    request before its answer has begun is logged and answered with 500, and the connection stays open; a later one is
    passed on to the server, which logs it and closes the connection."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        has_started = False

        async def count_and_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._metrics.count_http(path, message["status"])
            try:
                await send(message)
            except RuntimeError as error:
                if _CLOSED_TRANSPORT not in str(error):
                    raise  # else the client has reset the connection, and a disconnect message follows

        try:
            await self._app(scope, receive, count_and_send)
        except Exception:
            if has_started:
                raise
            log.exception("request %s failed, %s", request_id_of(Request(scope)), path)
            await internal_error(scope)(scope, receive, count_and_send)
