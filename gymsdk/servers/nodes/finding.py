"""Finding: where the head is: one that answers, or a place here where it is to begin, waited for within a bound."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable
from typing import TypeAlias

from gymsdk import http
from gymsdk.addresses import public
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.http import Answer
from gymsdk.servers.door import listener
from gymsdk.servers.nodes.instances import carried
from gymsdk.servers.nodes.service import Scheme, url
from gymsdk.told import value_of

JOINING = 60.0
"""Seconds in which a head has to answer."""

SAID = 5.0
"""Seconds after which somebody is told that a head is waited for: nodes that begin together need some for that."""

PAUSE = 0.5
"""Seconds between two looks for a head that does not answer, at most."""

ASKED = 2.0
"""Seconds in which one who is a head says so."""

SERVER_ERROR = 500

Headers: TypeAlias = Callable[[], http.Headers]
"""What every request carries; asked each time."""

log = logging.getLogger("gymsdk")


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
    at = url(host, port, scheme)
    waiting = Waiting(public(at), patience, "name the right host and port")
    while (why := await _no_head(at, headers)) is not None:
        if is_own(host):
            try:
                return listener.bound(host if listen is None else listen, port, what="the head")
            except UsageError as error:
                # Perhaps another node of this machine has begun a head a moment ago.
                why = str(error)
        await asyncio.sleep(waiting.next_pause(why))
    return None


class Waiting:
    """The wait for a head at *place*, *seconds* at most; told of once, after *said*. *cure* is what else helps."""

    def __init__(self, place: str, seconds: float, cure: str, *, said: float = SAID) -> None:
        self._place = place
        self._seconds = seconds
        self._cure = cure
        self._said = said
        self._began = time.monotonic()
        self._is_told = False

    def next_pause(self, why: str) -> float:
        """Give the seconds until the next look; raises `GymsdkError` where the wait is over, for the reason *why*."""
        passed = time.monotonic() - self._began
        if passed >= self._seconds:
            sentence = f"no head answers at {self._place} within {self._seconds:g} seconds ({why})"
            raise GymsdkError(f"{sentence}; start it there, or {self._cure}")
        if passed >= self._said and not self._is_told:
            self._is_told = True
            log.warning(
                "no head answers at %s yet (%s); it is waited for, %g s at most", self._place, why, self._seconds
            )
        return min(self._seconds - passed, random.uniform(PAUSE / 2, PAUSE))


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
        raise refusal(answer)
    return None


def refusal(answer: Answer) -> GymsdkError:
    """Give why *answer* lets nobody join: it is no head's, or the head refuses."""
    value = value_of(answer)
    detail = value.get("detail") if isinstance(value, dict) else None
    if answer.ok or answer.status in {404, 405}:
        sentence = f"{answer.host} is no head of gymsdk: it answered {answer.status} at /nodes"
        return GymsdkError(f"{sentence}; name the right one, or choose another port")
    return GymsdkError(f"the head {answer.host} refuses this node: {detail or answer.status}")
