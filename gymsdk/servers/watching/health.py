"""Health: whether servers answer, asked over their sockets."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import SecretStr

from gymsdk import trust
from gymsdk.servers.nodes.service import Scheme, Service, url

Status: TypeAlias = Literal["success", "connection_error", "timeout", "unknown_error"]
"""How a server answers, in NeMo Gym's words."""

PATIENCE = 2.0
"""Seconds a server may take to say that it is there."""

Place: TypeAlias = tuple[str, int, Scheme]
"""Where a server is asked: its host, its port, what is spoken."""

FRESH = 2.0
"""Seconds for which a server's answer is believed."""

BRIEF = 0.25
"""Seconds that somebody waits for an answer who can do without."""


async def status(
    host: str,
    port: int,
    scheme: Scheme = "http",
    *,
    path: str = "/",
    seconds: float = PATIENCE,
    headers: Mapping[str, SecretStr] | None = None,
) -> Status:
    """Give how the server at *host* and *port* answers, within *seconds*, when it is asked for *path* with *headers*.

    One that asks for a token is there.
    """
    near = url(host, port).removeprefix("http://").rpartition(":")[0].strip("[]")
    lines = [f"GET {path} HTTP/1.1", f"host: {near}", "connection: close"]
    lines += [f"{name}: {value.get_secret_value()}" for name, value in (headers or {}).items()]
    try:
        async with asyncio.timeout(seconds):
            first = await _first_line(near, port, scheme, "\r\n".join([*lines, "", ""]).encode())
    except TimeoutError:
        return "timeout"
    except (OSError, UnicodeError, ValueError):
        # A host that somebody made up may be none.
        return "connection_error"
    return "success" if re.match(rb"HTTP/1\.[01] [234]", first) else "unknown_error"


async def _first_line(host: str, port: int, scheme: Scheme, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=trust.at(host) if scheme == "https" else None)
    try:
        writer.write(sent)
        return await reader.readline()
    finally:
        writer.close()


@dataclass(slots=True)
class _Answer:
    """How one server answered last, *at* a time; *asking* is under way."""

    status: Status | None = None
    at: float = 0.0
    asking: asyncio.Task[Status] | None = None
    began: float = 0.0
    trip: float = 0.0


class Health:
    """How servers answer, each asked again after *fresh* seconds at the soonest, and waited for *brief* ones."""

    def __init__(
        self, *, fresh: float = FRESH, brief: float = BRIEF, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fresh = fresh
        self._brief = brief
        self._clock = clock
        self._answers: dict[Place, _Answer] = {}

    async def statuses(self, services: Iterable[Service]) -> Mapping[str, Status | None]:
        """Give how each of *services* answers, by id; `None` where it has not yet."""
        # Held here: whoever else asks meanwhile may have those forgotten that are gone.
        asked = {each.id: self._check(_place(each)) for each in services}
        if asking := {each.asking for each in asked.values() if each.asking is not None}:
            await asyncio.wait(asking, timeout=self._brief)
        return {name: each.status for name, each in asked.items()}

    def round_trips(self, services: Iterable[Service]) -> Mapping[str, float]:
        """Give the seconds that those of *services* took to answer last which do, by id."""
        known = ((each.id, self._answers.get(_place(each))) for each in services)
        return {one: round(found.trip, 6) for one, found in known if found is not None and found.status == "success"}

    def keep(self, services: Iterable[Service]) -> None:
        """Forget all but *services*."""
        kept = {_place(each) for each in services}
        for place in self._answers.keys() - kept:
            del self._answers[place]

    def _check(self, place: Place) -> _Answer:
        known = self._answers.setdefault(place, _Answer())
        if known.asking is None and (known.status is None or self._clock() - known.at > self._fresh):
            known.began = self._clock()
            known.asking = asyncio.ensure_future(status(*place))
            known.asking.add_done_callback(lambda task: self._record(known, task))
        return known

    def _record(self, known: _Answer, task: asyncio.Task[Status]) -> None:
        known.asking, known.at = None, self._clock()
        known.trip = known.at - known.began
        known.status = "timeout" if task.cancelled() else task.result()


def _place(service: Service) -> Place:
    return service.host, service.port, service.scheme
