"""A node: a process that holds servers, as it makes itself known to a head elsewhere."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence

from gymsdk.client import parse_value
from gymsdk.errors import Failed, GymsdkError
from gymsdk.http import client
from gymsdk.http.client import HttpResponse
from gymsdk.http.tls import redact_url
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers.discovery import JOIN_SECONDS, REQUEST_SECONDS, SERVER_ERROR, Headers, HeadWait, join_error
from gymsdk.servers.instances import auth_headers
from gymsdk.servers.reports import LEASE_SECONDS, Exit, Load, Registration
from gymsdk.servers.service import Service

LEAVING = 2.0
"""Seconds that saying goodbye may take."""

PROMPT = 1.0
"""Seconds in which one who starts servers anew is told to, at most."""

LEFT = 410
"""The status of a head that a node has left, or been taken from."""

log = logging.getLogger("gymsdk")


class Node:
    """*services* of this process, known to the head at *head_url* for as long as it runs.

    *loads* tells what they have to do, *expected* which servers there are to be, *exits* how some have ended; whoever
    can *restart* those that *restarts* gives, with their processes, is told when to. It is gone from the head *lease*
    seconds after it was last heard of; *joining* bounds the wait for the first answer. The nodes of processes that are
    supervised together name the same *supervisor*. When there are *news*, the head is told at once. While *alive* is
    false, the node sends no heartbeat, so that the head stops sending requests to it.
    """

    def __init__(  # noqa: PLR0913 - what a node has to say, each by its name
        self,
        head_url: str,
        services: Callable[[], Sequence[Service]] | Sequence[Service] = (),
        loads: Callable[[], Mapping[str, Load]] = dict,
        *,
        expected: Callable[[], Sequence[str]] | Sequence[str] = (),
        exits: Callable[[], Mapping[str, Exit]] = dict,
        headers: Headers = auth_headers,
        restart: Callable[[str], None] | None = None,
        restarts: Callable[[], Mapping[str, int]] = dict,
        lease: float = LEASE_SECONDS,
        joining: float = JOIN_SECONDS,
        supervisor: str = "",
        news: asyncio.Event | None = None,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.head_url = head_url.rstrip("/")
        self._services = services
        self._loads = loads
        self._expected = expected
        self._exits = exits
        self._restart = restart
        self._restarts = restarts
        self._headers = headers
        self._lease = lease
        self._granted = lease
        self._joining = joining
        self._supervisor = supervisor
        self._news = news or asyncio.Event()
        self._alive = alive
        self._stuck = False
        self._out = False
        self._draining = False
        self._leaving = False

    @property
    def what(self) -> str:
        """What it is called where it runs beside others."""
        return f"the node at the head {client.get_host(self.head_url)}"

    async def run(self, up: asyncio.Event, over: asyncio.Event) -> None:
        """Join, set *up*, be heard of until it is *over*, and leave; raises `GymsdkError` where it cannot join."""
        try:
            await self.join(over)
            up.set()
            while not await _passed(over, self._pause(), self._news):
                self._news.clear()
                await self.beat()
        finally:
            await self.leave()

    async def join(self, over: asyncio.Event | None = None) -> None:
        """Be known to the head, or wait until it is *over*.

        Raises `GymsdkError` where the head does not answer in time, or will not have this node.
        """
        waiting = HeadWait(redact_url(self.head_url), self._joining, "name the right one with --head")
        while (why := await self._told()) is not None:
            if await _passed(over or asyncio.Event(), waiting.next_pause(why)):
                return

    async def beat(self) -> None:
        """Be heard of once; a head that does not answer is told of in the log, once, and so is that it is back."""
        if not self._alive():
            if not self._stuck:
                log.error("%s: its event loop is blocked; no heartbeat is sent until it runs again", self.what)
            self._stuck = True
            return
        self._stuck = False
        try:
            why = await self._told()
        except GymsdkError as error:
            why = str(error)
        if why is not None and not self._out:
            log.warning("%s: %s; its servers go on, and it keeps trying", self.what, why)
        if why is None and self._out:
            log.warning("%s: it answers again, and knows this node's servers", self.what)
        self._out = why is not None

    async def drain(self) -> None:
        """Be given nothing new from now on: what is under way may end."""
        self._draining = True
        await self.beat()

    async def leave(self) -> None:
        """Be gone from the head at once; a head that does not answer in time forgets this node by itself."""
        self._leaving = True
        try:
            await client.delete(self._at, headers=self._headers(), timeout=LEAVING, retry=client.NO_RETRY)
        except Failed as error:
            log.info("%s: it could not be told of the end: %s", self.what, error)

    @property
    def _at(self) -> str:
        return f"{self.head_url}/nodes/{self.id}"

    def _pause(self) -> float:
        # Jitter, so that the nodes of one start do not come together for ever; what failed is tried sooner.
        pause = self._granted / (6 if self._out else 3)
        return min(pause, pause if self._restart is None else PROMPT) * random.uniform(0.8, 1.0)

    async def _told(self) -> str | None:
        """Tell the head, and give why it did not take it in; raises `GymsdkError` where it never will."""
        bound = max(0.1, min(REQUEST_SECONDS, self._granted / 3))
        running = dict(self._restarts())
        try:
            sent = self.id
            answer = await self._put(bound)
            if answer.status == LEFT and not self._leaving:
                # Whoever had it leave meant what was there then: these servers still are. Two that are told so at
                # once are one node all the same.
                self.id = secrets.token_hex(8) if self.id == sent else self.id
                answer = await self._put(bound)
        except Failed as error:
            return str(error)
        if answer.status >= SERVER_ERROR:
            return f"it answered {answer.status}"
        self._granted = _lease(answer)
        if self._restart is not None:
            for name in answer.json().get("restart", ()):
                # Those that ended while the answer was on its way have been started anew by now.
                if self._restarts().get(name) == running.get(name):
                    self._restart(name)
        return None

    async def _put(self, seconds: float) -> HttpResponse:
        said = self._said().model_dump(mode="json")
        return await client.put(self._at, said, headers=self._headers(), timeout=seconds, retry=client.NO_RETRY)

    def _said(self) -> Registration:
        services = self._services() if callable(self._services) else self._services
        expected = self._expected() if callable(self._expected) else self._expected
        return Registration(
            services=[*services],
            loads=dict(self._loads()),
            expected=[*expected],
            exits=dict(self._exits()),
            draining=self._draining,
            restarts=dict(self._restarts()),
            seconds=self._lease,
            supervisor=self._supervisor,
        )


def loads(figures: Mapping[str, ServerMetrics]) -> dict[str, Load]:
    """Give what servers have to do, by name, as their *figures* say."""
    return {
        name: Load(sessions=_gauge(each, "sessions"), in_flight=_gauge(each, "playing"))
        for name, each in figures.items()
    }


def _gauge(figures: ServerMetrics, word: str) -> int:
    return round(sum(look() for name, look in figures.gauges.items() if word in name))


def _lease(answer: HttpResponse) -> float:
    """Give the lease that a head grants; raises `GymsdkError` where *answer* is no head's, or a refusal."""
    value = parse_value(answer) if answer.ok else None
    lease = value.get("lease") if isinstance(value, dict) else None
    if not isinstance(lease, (int, float)) or lease <= 0:
        raise join_error(answer)
    return float(lease)


async def _passed(over: asyncio.Event, seconds: float, *news: asyncio.Event) -> bool:
    """Whether it is *over*, *seconds* from now at the latest, or when there are *news*."""
    waiting = [asyncio.ensure_future(each.wait()) for each in (over, *news)]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when="FIRST_COMPLETED")
    finally:
        for each in waiting:
            each.cancel()
    return over.is_set()
