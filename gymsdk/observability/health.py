"""Health checks of servers over raw sockets."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import SecretStr

from gymsdk.http import tls
from gymsdk.servers.service import Scheme, Service, build_url

Status: TypeAlias = Literal["success", "connection_error", "timeout", "unknown_error"]
"""The result of a health check, in NeMo Gym's terms."""

HEALTH_SECONDS = 2.0
"""Timeout of a health check, in seconds."""

Address: TypeAlias = tuple[str, int, Scheme]
"""A server's address: host, port and URL scheme."""

REFRESH_SECONDS = 2.0
"""Seconds that a result is cached."""

MAX_WAIT_SECONDS = 0.25
"""Longest time that a caller waits for a check under way, in seconds."""


async def check_status(
    host: str,
    port: int,
    scheme: Scheme = "http",
    *,
    path: str = "/",
    seconds: float = HEALTH_SECONDS,
    headers: Mapping[str, SecretStr] | None = None,
) -> Status:
    """Check whether a server answers; a server that requires a token counts as healthy.

    Args:
        host: The server's host.
        port: The port.
        scheme: The URL scheme.
        path: The path to request.
        seconds: The timeout.
        headers: Headers of the request.
    """
    address = build_url(host, port).removeprefix("http://").rpartition(":")[0].strip("[]")
    lines = [f"GET {path} HTTP/1.1", f"host: {address}", "connection: close"]
    lines += [f"{name}: {value.get_secret_value()}" for name, value in (headers or {}).items()]
    try:
        async with asyncio.timeout(seconds):
            status_line = await _read_status_line(address, port, scheme, "\r\n".join([*lines, "", ""]).encode())
    except TimeoutError:
        return "timeout"
    except (OSError, UnicodeError, ValueError):
        # The host comes from a node's report and may be invalid.
        return "connection_error"
    return "success" if re.match(rb"HTTP/1\.[01] [234]", status_line) else "unknown_error"


async def _read_status_line(host: str, port: int, scheme: Scheme, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(
        host, port, ssl=tls.get_ssl_context(host) if scheme == "https" else None
    )
    try:
        writer.write(sent)
        return await reader.readline()
    finally:
        writer.close()


@dataclass(slots=True)
class _HealthRecord:
    """The last check of one server, and the check under way."""

    status: Status | None = None
    at: float = 0.0
    task: asyncio.Task[Status] | None = None
    started: float = 0.0
    round_trip: float = 0.0


class HealthMonitor:
    """Cached health checks of several servers.

    Args:
        fresh: Seconds that a result is cached.
        brief: Longest time that `statuses` waits for checks under way, in seconds.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        *,
        fresh: float = REFRESH_SECONDS,
        brief: float = MAX_WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fresh = fresh
        self._brief = brief
        self._clock = clock
        self._answers: dict[Address, _HealthRecord] = {}

    async def statuses(self, services: Iterable[Service]) -> Mapping[str, Status | None]:
        """Return each service's status by id, or `None` if its first check is still under way."""
        # Keep references: a concurrent call of `keep` may remove records.
        records = {service.id: self._check(_address_of(service)) for service in services}
        if running := {service.task for service in records.values() if service.task is not None}:
            await asyncio.wait(running, timeout=self._brief)
        return {name: service.status for name, service in records.items()}

    def round_trips(self, services: Iterable[Service]) -> Mapping[str, float]:
        """Return how many seconds the last check of each healthy service took, by id."""
        known = ((service.id, self._answers.get(_address_of(service))) for service in services)
        return {
            service_id: round(record.round_trip, 6)
            for service_id, record in known
            if record is not None and record.status == "success"
        }

    def keep(self, services: Iterable[Service]) -> None:
        """Forget all services but these."""
        kept = {_address_of(service) for service in services}
        for place in self._answers.keys() - kept:
            del self._answers[place]

    def _check(self, place: Address) -> _HealthRecord:
        record = self._answers.setdefault(place, _HealthRecord())
        if record.task is None and (record.status is None or self._clock() - record.at > self._fresh):
            record.started = self._clock()
            record.task = asyncio.ensure_future(check_status(*place))
            record.task.add_done_callback(lambda task: self._record(record, task))
        return record

    def _record(self, record: _HealthRecord, task: asyncio.Task[Status]) -> None:
        record.task, record.at = None, self._clock()
        record.round_trip = record.at - record.started
        record.status = "timeout" if task.cancelled() else task.result()


def _address_of(service: Service) -> Address:
    return service.host, service.port, service.scheme
