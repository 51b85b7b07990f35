"""Admission: the number of requests in flight, from the arrival of their bodies to the end of their answers. Pure."""

from splitserve.router.http.api_error import ApiError


class Admission:
    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.num_admitted = 0
        self.num_elsewhere = 0  # those that other routers have admitted

    def admit(self, count: int, param: str | None = None) -> None:
        """Take ``count`` slots. Raises :class:`ApiError` 429 if they aren't free, 400 if so many never fit."""
        if count > self._max_in_flight:
            raise ApiError(
                400, f"{count} outputs in one request (prompts times n); at most {self._max_in_flight} fit", param=param
            )
        num_admitted = self.num_admitted + self.num_elsewhere
        if num_admitted + count > self._max_in_flight:
            message = f"{num_admitted} requests are in flight and {self._max_in_flight} are allowed: try again"
            raise ApiError(429, message, code="too_many_requests")
        self.num_admitted += count

    def release(self, count: int) -> None:
        """Release slots that ``admit`` took."""
        self.num_admitted -= count
