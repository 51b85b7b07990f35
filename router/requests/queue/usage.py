"""Usage of tenants against their own limits. Pure; time is an argument."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from splitserve.router.http.api_error import ApiError
from splitserve.router.requests.queue.tenants import OWN, Tenant, Tenants

_BURST_SECONDS = 60.0


@dataclass(slots=True)
class _Usage:
    num_in_flight: int = 0
    tokens: float = 0.0  # used, less those that the limit has given back since
    at: float = 0.0


class TenantUsage:
    """Requests in flight and tokens of each tenant."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Usage] = {}
        self._num_tokens: dict[str, int] = {}  # used here, of tenants with a limit
        self.in_flight_elsewhere: Mapping[str, int] = {}  # at other routers, by tenant

    def admit(self, tenant: Tenant, count: int, now: float, param: str | None = None) -> None:
        """Count ``count`` more requests. Raises :class:`ApiError` 429 with the time to wait beyond a limit, 400 if so
        many never fit."""
        most = tenant.max_requests_in_flight
        if most and count > most:
            message = f"{count} outputs in one request (prompts times n); at most {most} of {tenant.name} fit"
            raise ApiError(400, message, param=param)
        usage = self._of(tenant, now)
        num_in_flight = usage.num_in_flight + self.in_flight_elsewhere.get(tenant.name, 0)
        if most and num_in_flight + count > most:
            message = f"{num_in_flight} requests of {tenant.name} are in flight and {most} are allowed: try again"
            raise ApiError(429, message, code="too_many_requests")
        if tenant.tokens_per_minute and usage.tokens >= tenant.tokens_per_minute:
            excess = usage.tokens - tenant.tokens_per_minute
            seconds = max(1, math.ceil(_BURST_SECONDS * excess / tenant.tokens_per_minute))
            message = f"{tenant.name} has used its {tenant.tokens_per_minute:g} tokens per minute: try again"
            raise ApiError(429, message, code="too_many_tokens", retry_after_seconds=seconds)
        usage.num_in_flight += count

    def release(self, name: str, count: int) -> None:
        """Take requests that have ended off the count, which stays at 0 or more."""
        usage = self._by_name.get(name)
        if usage is None:
            return
        usage.num_in_flight = max(0, usage.num_in_flight - count)
        if not (usage.num_in_flight or usage.tokens):
            del self._by_name[name]

    def note_tokens(self, tenant: Tenant, count: int, now: float) -> None:
        """Count tokens of a prompt or an output."""
        if tenant.tokens_per_minute:
            self._of(tenant, now).tokens += count
            self._num_tokens[tenant.name] = self._num_tokens.get(tenant.name, 0) + count

    def note_elsewhere(self, tenant: Tenant, count: int, now: float) -> None:
        """Count tokens that a tenant has used at another router."""
        if tenant.tokens_per_minute:
            self._of(tenant, now).tokens += count

    def raise_level(self, tenant: Tenant, level: float, now: float) -> None:
        """Count at least ``level`` tokens as used: another router, which was there before, says so."""
        if tenant.tokens_per_minute:
            usage = self._of(tenant, now)
            usage.tokens = max(usage.tokens, level)

    def uses(self, tenants: Tenants, now: float) -> Iterator[tuple[str, int, int, float]]:
        """Yield name, requests in flight here, tokens used here, and tokens that its limit has not given back, of each
        tenant that has any."""
        self._num_tokens = {name: count for name, count in self._num_tokens.items() if name in tenants.by_name}
        for name in self._by_name.keys() | self._num_tokens.keys():
            usage = self._of(tenants.named(name), now) if name in tenants.by_name else self._by_name[name]
            yield name, usage.num_in_flight, self._num_tokens.get(name, 0), usage.tokens

    def in_flight(self) -> dict[str, int]:
        """Return the requests in flight of each tenant that has any."""
        return {name: usage.num_in_flight for name, usage in self._by_name.items() if usage.num_in_flight}

    def _of(self, tenant: Tenant, now: float) -> _Usage:
        usage = self._by_name.setdefault(tenant.name or OWN, _Usage(at=now))
        regained = tenant.tokens_per_minute * (now - usage.at) / _BURST_SECONDS
        usage.tokens, usage.at = max(0.0, usage.tokens - regained), now
        return usage
