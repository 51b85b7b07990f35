"""``/admin``: endpoints by which operators act on the running cluster."""

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve.common.faults import words_of_fault
from splitserve.router.http.access.content_type import check_json
from splitserve.router.http.api_error import ApiError, error_of_refusal
from splitserve.router.http.bodies.reader import BodyReader
from splitserve.router.requests.dispatcher import Dispatcher
from splitserve.router.requests.events import PauseMode
from splitserve.router.requests.operations.refusal import OperationRefusedError

MAX_BODY_BYTES = 4096


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: PauseMode = PauseMode.WAIT


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    force: bool = False


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body without fields; it may also be left out."""


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class Operators:
    """The handlers."""

    def __init__(self, dispatcher: Dispatcher, bodies: BodyReader) -> None:
        self._operations = dispatcher.operations
        self._bodies = bodies

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Return the body; an empty one stands for the defaults. Raises :class:`ApiError` 400 that names the fault."""
        check_json(request)
        async with self._bodies.read(request, MAX_BODY_BYTES) as content:
            try:
                document = msgspec.json.decode(content or b"{}")
                return msgspec.convert(document, kind)
            except msgspec.ValidationError as error:
                message = words_of_fault(str(error), document, lambda _: kind.__struct_fields__, root="the body")
                if message.startswith("mode: "):
                    message += f"; it is one of {', '.join(PauseMode)}"
                raise ApiError(400, message, code="invalid_value") from error
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise ApiError(400, f"body: {error}", code="invalid_value") from error

    async def pause(self, request: Request) -> Response:
        body = await self._read(request, PauseBody)
        return JSONResponse(await self._operations.pause(body.mode))

    async def resume(self, request: Request) -> Response:
        await self._read(request, NoFields)
        return JSONResponse(await self._operations.resume())

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self._read(request, NoFields)
        return JSONResponse(await self._operations.reset_prefix_caches())

    async def drain(self, request: Request) -> Response:
        body = await self._read(request, DrainBody)
        try:
            return JSONResponse(self._operations.drain(request.path_params["worker"], force=body.force))
        except OperationRefusedError as refusal:
            raise error_of_refusal(refusal) from refusal
