"""Parts of a request's way through the server that all generating endpoints share."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from splitserve.protocol.config import RequestClass
from splitserve.router.http.access.api_key import tenant_of
from splitserve.router.http.access.content_type import check_json
from splitserve.router.http.access.request_id import reading_of, request_id_of, trace_of
from splitserve.router.http.answers import GenerationResponse
from splitserve.router.http.api_error import ApiError, clipped
from splitserve.router.http.bodies.reader import BodyReader
from splitserve.router.http.formats import Format
from splitserve.router.http.parsing import RequestModel
from splitserve.router.http.prompt import Prompt
from splitserve.router.http.schema import MAX_PRIORITY, MAX_SESSION_CHARS, GenerationRequest
from splitserve.router.http.served_model import ServedModel
from splitserve.router.placement.placer import Limits
from splitserve.router.requests.active_request import RequestContext
from splitserve.router.requests.dispatcher import ClientGoneError, Dispatcher
from splitserve.router.requests.queue.tenants import OWN
from splitserve.router.text.preparation import Preparation

CLASS_HEADER = "x-request-class"
PRIORITY_HEADER = "x-priority"
SESSION_HEADER = "x-session-id"
ROUTE_HEADER = "x-route"
_PROBE_ROUTE = "disaggregated"  # for probes of hand-overs


class Serving:
    """Reading of bodies, limits of the workers, admission, answers. ``model``: the served one."""

    def __init__(
        self, model: ServedModel, dispatcher: Dispatcher, preparation: Preparation, bodies: BodyReader
    ) -> None:
        self.model = model
        self.dispatcher = dispatcher
        self.preparation = preparation
        self.bodies = bodies

    async def read(self, request: Request, model: type[RequestModel]) -> tuple[RequestModel, int]:
        """Return the request's body and its size in bytes. Raises :class:`ApiError`."""
        check_json(request)
        body, num_bytes = await self.bodies.parse(request, model)
        self.model.name(body.model)
        return body, num_bytes

    async def limits(self, request: Request, arrived_at: float, num_bytes: int) -> Limits:
        """Return the limits of the current workers, or wait shortly for workers. Raises :class:`ApiError` 503."""
        watchers: list[asyncio.Task[None]] = []

        def watch_client() -> asyncio.Task[None]:
            watchers.append(asyncio.create_task(_until_disconnected(request)))
            return watchers[-1]

        try:
            return await self.dispatcher.limits(arrived_at, num_bytes, watch_client)
        except ClientGoneError:
            raise ClientDisconnect from None
        finally:
            for watcher in watchers:
                watcher.cancel()

    async def generate(
        self,
        request: Request,
        body: GenerationRequest,
        num_bytes: int,
        answer_format: Format,
        prepare: Callable[[Limits], Awaitable[list[Prompt]]],
        *,
        arrived_at: float,
        count: int = 1,
    ) -> GenerationResponse:
        """Return the answer to ``body``, whose ``count`` prompts come from ``prepare``. Raises :class:`ApiError`."""
        limits = await self.limits(request, arrived_at, num_bytes)
        count *= body.num_choices
        context = self.context_of(request, body)
        self.dispatcher.admit(count, "n" if body.num_choices > 1 else "prompt", context.tenant)
        try:
            return GenerationResponse(
                self.dispatcher,
                await prepare(limits),
                answer_format,
                arrived_at=arrived_at,
                stream=bool(body.stream),
                return_route=bool(body.return_route),
                continuous_usage=body.continuous_usage,
                context=context,
            )
        except BaseException:
            self.dispatcher.release(count, context.tenant)
            raise

    @contextmanager
    def slot(self, request: Request) -> Iterator[None]:
        """Hold a slot among the requests in flight, all and the tenant's, while the router computes an answer itself.
        Raises :class:`ApiError` 429."""
        tenant = tenant_of(request)
        self.dispatcher.admit(1, tenant=tenant)
        try:
            yield
        finally:
            self.dispatcher.release(1, tenant)

    def context_of(self, request: Request, body: GenerationRequest) -> RequestContext:
        """Return the properties that a request has beside its prompt and its sampling. Raises :class:`ApiError` 400."""
        headers = _own_headers(request)
        name = headers.get(CLASS_HEADER, "") if body.request_class is None else body.request_class
        session = headers.get(SESSION_HEADER, "") if body.session_id is None else body.session_id
        if len(session) > MAX_SESSION_CHARS:
            message = f"{SESSION_HEADER} has {len(session)} characters; at most {MAX_SESSION_CHARS} are allowed"
            raise ApiError(400, message, param="session_id", code="invalid_value")
        priority = _priority(headers.get(PRIORITY_HEADER)) if body.priority is None else body.priority
        request_class, tenant = self.dispatcher.classes.of(name), tenant_of(request)
        _check_rank(priority, request_class, tenant)
        return RequestContext(
            client_id=request_id_of(request),
            cache_salt=body.cache_salt or "",
            priority=priority,
            session=session,
            request_class=request_class,
            tenant=tenant,
            is_probe=_is_probe(headers.get(ROUTE_HEADER)),
            read_at=reading_of(request),
            trace=trace_of(request),
        )

    def weights_version(self) -> str:
        """Return the identity of the workers' weights; "" while none is registered, or during an upgrade that changes
        it."""
        versions = {record.info.layout.weights_version for record in self.dispatcher.fleet.membership.records()}
        return versions.pop() if len(versions) == 1 else ""


def _own_headers(request: Request) -> dict[str, str]:
    """Return the request's headers that are of this server's own; of several with one name, the first."""
    found = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw if name[:2] == b"x-"
    ]
    return dict(reversed(found))


def _priority(given: str | None) -> int | None:
    """Return the priority in a header. Raises :class:`ApiError` 400 for anything but a whole number in its range."""
    if given is None:
        return None
    if re.fullmatch("[+-]?[0-9]{1,10}", given, re.ASCII) and -MAX_PRIORITY <= int(given) < MAX_PRIORITY:
        return int(given)
    message = (
        f"{PRIORITY_HEADER} is {clipped(given, 100)!r}; it must be a whole number from {-MAX_PRIORITY} to "
        f"{MAX_PRIORITY - 1}"
    )
    raise ApiError(400, message, param="priority", code="invalid_value")


def _check_rank(priority: int | None, request_class: RequestClass, tenant: str) -> None:
    """Raise :class:`ApiError` 400 where a tenant's request would come before the others of its class, and so before
    those of other tenants, whatever their shares."""
    if priority is not None and priority < request_class.priority and tenant != OWN:
        message = (
            f"priority is {priority}; a request with a tenant's key can have {request_class.priority}, the priority of "
            f"class {request_class.name}, or a higher number, which begins later"
        )
        raise ApiError(400, message, param="priority", code="invalid_value")


def _is_probe(route: str | None) -> bool:
    """Return whether the header asks for a hand-over. Raises :class:`ApiError` 400 for an unknown value."""
    if route not in (None, _PROBE_ROUTE):
        message = f"{ROUTE_HEADER} is {clipped(route, 100)!r}; it must be {_PROBE_ROUTE!r}, or left out"
        raise ApiError(400, message, param=ROUTE_HEADER, code="invalid_value")
    return route is not None


async def _until_disconnected(request: Request) -> None:
    """Wait until the client disconnects; the request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
