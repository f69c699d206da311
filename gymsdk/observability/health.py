"""Health: whether servers answer, asked over their sockets."""

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
"""How a server answers, in NeMo Gym's words."""

HEALTH_SECONDS = 2.0
"""Seconds a server may take to say that it is there."""

Address: TypeAlias = tuple[str, int, Scheme]
"""Where a server is asked: its host, its port, what is spoken."""

REFRESH_SECONDS = 2.0
"""Seconds for which a server's answer is believed."""

MAX_WAIT_SECONDS = 0.25
"""Seconds that somebody waits for an answer who can do without."""


async def check_status(
    host: str,
    port: int,
    scheme: Scheme = "http",
    *,
    path: str = "/",
    seconds: float = HEALTH_SECONDS,
    headers: Mapping[str, SecretStr] | None = None,
) -> Status:
    """Give how the server at *host* and *port* answers, within *seconds*, when it is asked for *path* with *headers*.

    One that asks for a token is there.
    """
    near = build_url(host, port).removeprefix("http://").rpartition(":")[0].strip("[]")
    lines = [f"GET {path} HTTP/1.1", f"host: {near}", "connection: close"]
    lines += [f"{name}: {value.get_secret_value()}" for name, value in (headers or {}).items()]
    try:
        async with asyncio.timeout(seconds):
            first = await _read_status_line(near, port, scheme, "\r\n".join([*lines, "", ""]).encode())
    except TimeoutError:
        return "timeout"
    except (OSError, UnicodeError, ValueError):
        # A host that somebody made up may be none.
        return "connection_error"
    return "success" if re.match(rb"HTTP/1\.[01] [234]", first) else "unknown_error"


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
    """How one server answered last, *at* a time; *asking* is under way."""

    status: Status | None = None
    at: float = 0.0
    asking: asyncio.Task[Status] | None = None
    began: float = 0.0
    trip: float = 0.0


class HealthMonitor:
    """How servers answer, each asked again after *fresh* seconds at the soonest, and waited for *brief* ones."""

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
        """Give how each of *services* answers, by id; `None` where it has not yet."""
        # Held here: whoever else asks meanwhile may have those forgotten that are gone.
        asked = {each.id: self._check(_address_of(each)) for each in services}
        if asking := {each.asking for each in asked.values() if each.asking is not None}:
            await asyncio.wait(asking, timeout=self._brief)
        return {name: each.status for name, each in asked.items()}

    def round_trips(self, services: Iterable[Service]) -> Mapping[str, float]:
        """Give the seconds that those of *services* took to answer last which do, by id."""
        known = ((each.id, self._answers.get(_address_of(each))) for each in services)
        return {one: round(found.trip, 6) for one, found in known if found is not None and found.status == "success"}

    def keep(self, services: Iterable[Service]) -> None:
        """Forget all but *services*."""
        kept = {_address_of(each) for each in services}
        for place in self._answers.keys() - kept:
            del self._answers[place]

    def _check(self, place: Address) -> _HealthRecord:
        known = self._answers.setdefault(place, _HealthRecord())
        if known.asking is None and (known.status is None or self._clock() - known.at > self._fresh):
            known.began = self._clock()
            known.asking = asyncio.ensure_future(check_status(*place))
            known.asking.add_done_callback(lambda task: self._record(known, task))
        return known

    def _record(self, known: _HealthRecord, task: asyncio.Task[Status]) -> None:
        known.asking, known.at = None, self._clock()
        known.trip = known.at - known.began
        known.status = "timeout" if task.cancelled() else task.result()


def _address_of(service: Service) -> Address:
    return service.host, service.port, service.scheme
