"""A node: a process that holds servers, as it makes itself known to a head elsewhere."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from gymsdk import http
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.http import Answer
from gymsdk.servers.door import listener
from gymsdk.servers.nodes.instances import carried
from gymsdk.servers.nodes.reports import LEASE, Exit, Load, Registration
from gymsdk.servers.nodes.service import Scheme, Service, url
from gymsdk.servers.watching.figures import Figures
from gymsdk.told import value_of

JOINING = 60.0
"""Seconds in which a head has to answer."""

LEAVING = 2.0
"""Seconds that saying goodbye may take."""

PAUSE = 0.5
"""Seconds between two looks for a head that does not answer, at most."""

PROMPT = 1.0
"""Seconds in which one who starts servers anew is told to, at most."""

ASKED = 2.0
"""Seconds in which one who is a head says so."""

SERVER_ERROR = 500
LEFT = 410
"""The status of a head that a node has left, or been taken from."""

Headers: TypeAlias = Callable[[], http.Headers]
"""What every request carries; asked each time."""

log = logging.getLogger("gymsdk")


class Node:
    """*services* of this process, known to the head at *head_url* for as long as it runs.

    *loads* tells what they have to do, *expected* which servers there are to be, *exits* how some have ended; whoever
    can *restart* those that *restarts* gives, with their processes, is told when to. It is gone from the head *lease*
    seconds after it was last heard of; *joining* bounds the wait for the first answer. The nodes of processes that are
    supervised together name the same *supervisor*. When there are *news*, the head is told at once.
    """

    def __init__(  # noqa: PLR0913 - what a node has to say, each by its name
        self,
        head_url: str,
        services: Callable[[], Sequence[Service]] | Sequence[Service] = (),
        loads: Callable[[], Mapping[str, Load]] = dict,
        *,
        expected: Callable[[], Sequence[str]] | Sequence[str] = (),
        exits: Callable[[], Mapping[str, Exit]] = dict,
        headers: Headers = carried,
        restart: Callable[[str], None] | None = None,
        restarts: Callable[[], Mapping[str, int]] = dict,
        lease: float = LEASE,
        joining: float = JOINING,
        supervisor: str = "",
        news: asyncio.Event | None = None,
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
        self._out = False
        self._draining = False
        self._leaving = False

    @property
    def what(self) -> str:
        """What it is called where it runs beside others."""
        return f"the node at the head {http.host(self.head_url)}"

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
        loop = asyncio.get_running_loop()
        until = loop.time() + self._joining
        while True:
            why = await self._told()
            if why is None:
                return
            left = until - loop.time()
            if left <= 0:
                sentence = f"no head answers at {self.head_url} within {self._joining:g} seconds ({why})"
                raise GymsdkError(f"{sentence}; start it there, or name the right one with --head")
            if await _passed(over or asyncio.Event(), min(left, random.uniform(PAUSE / 2, PAUSE))):
                return

    async def beat(self) -> None:
        """Be heard of once; a head that does not answer is told of in the log, once, and so is that it is back."""
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
            await http.delete(self._at, headers=self._headers(), timeout=LEAVING, retry=http.ONCE)
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
        bound = max(0.1, min(ASKED, self._granted / 3))
        try:
            answer = await self._put(bound)
            if answer.status == LEFT and not self._leaving:
                # Whoever had it leave meant what was there then: these servers still are.
                self.id = secrets.token_hex(8)
                answer = await self._put(bound)
        except Failed as error:
            return str(error)
        if answer.status >= SERVER_ERROR:
            return f"it answered {answer.status}"
        self._granted = _lease(answer)
        if self._restart is not None:
            for name in answer.json().get("restart", ()):
                self._restart(name)
        return None

    async def _put(self, seconds: float) -> Answer:
        said = self._said().model_dump(mode="json")
        return await http.put(self._at, said, headers=self._headers(), timeout=seconds, retry=http.ONCE)

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


def loads(figures: Mapping[str, Figures]) -> dict[str, Load]:
    """Give what servers have to do, by name, as their *figures* say."""
    return {
        name: Load(sessions=_gauge(each, "sessions"), in_flight=_gauge(each, "playing"))
        for name, each in figures.items()
    }


def _gauge(figures: Figures, word: str) -> int:
    return round(sum(look() for name, look in figures.gauges.items() if word in name))


async def place(
    host: str,
    port: int,
    *,
    scheme: Scheme = "http",
    listen: str | None = None,
    headers: Headers = carried,
    patience: float = JOINING,
) -> socket.socket | None:
    """Give the socket at which the head of *host* and *port* is to be started here, or `None` where it is to be joined.

    One that answers there is joined; if the address is this machine's own, the socket is bound (at *listen*, if that
    is given); else it is waited for. Raises `GymsdkError` where no head answers within *patience* seconds.
    """
    loop, at = asyncio.get_running_loop(), url(host, port, scheme)
    until = loop.time() + patience
    while True:
        why = await _no_head(at, headers)
        if why is None:
            return None
        if is_own(host):
            try:
                return listener.bound(host if listen is None else listen, port, what="the head")
            except UsageError as error:
                # Perhaps another node of this machine has begun a head a moment ago.
                why = str(error)
        if loop.time() >= until:
            sentence = f"no head answers at {at} within {patience:g} seconds ({why})"
            raise GymsdkError(f"{sentence}; start it there, or name the right host and port")
        await asyncio.sleep(random.uniform(PAUSE / 2, PAUSE))


def is_own(host: str) -> bool:
    """Whether *host* is an address of this machine: whether something can listen there."""
    try:
        listener.bound(host).close()
    except (UsageError, UnicodeError):
        return False
    return True


async def _no_head(at: str, headers: Headers) -> str | None:
    """Give why what is *at* a URL is no head that can be asked, `None` where it is one; raises `GymsdkError`."""
    try:
        answer = await http.get(at + "/nodes", headers=headers(), timeout=ASKED, retry=http.ONCE)
    except Failed as error:
        return str(error)
    if answer.status >= SERVER_ERROR:
        return f"it answered {answer.status}"
    if not answer.ok or not isinstance(value_of(answer), dict):
        raise _refusal(answer)
    return None


def _lease(answer: Answer) -> float:
    """Give the lease that a head grants; raises `GymsdkError` where *answer* is no head's, or a refusal."""
    value = value_of(answer) if answer.ok else None
    lease = value.get("lease") if isinstance(value, dict) else None
    if not isinstance(lease, (int, float)) or lease <= 0:
        raise _refusal(answer)
    return float(lease)


def _refusal(answer: Answer) -> GymsdkError:
    value = value_of(answer)
    detail = value.get("detail") if isinstance(value, dict) else None
    if answer.ok or answer.status in {404, 405}:
        sentence = f"{answer.host} is no head of gymsdk: it answered {answer.status} at /nodes"
        return GymsdkError(f"{sentence}; name the right one, or choose another port")
    return GymsdkError(f"the head {answer.host} refuses this node: {detail or answer.status}")


async def _passed(over: asyncio.Event, seconds: float, *news: asyncio.Event) -> bool:
    """Whether it is *over*, *seconds* from now at the latest, or when there are *news*."""
    waiting = [asyncio.ensure_future(each.wait()) for each in (over, *news)]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when="FIRST_COMPLETED")
    finally:
        for each in waiting:
            each.cancel()
    return over.is_set()
