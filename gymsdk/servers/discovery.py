"""Finding: where the head is: one that answers, or a place here where it is to begin, waited for within a bound."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable
from typing import TypeAlias

from gymsdk.client import parse_value
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.http import client
from gymsdk.http.client import HttpResponse
from gymsdk.http.tls import redact_url
from gymsdk.servers import listener
from gymsdk.servers.instances import auth_headers
from gymsdk.servers.service import Scheme, build_url

JOIN_SECONDS = 60.0
"""Seconds in which a head has to answer."""

LOG_AFTER_SECONDS = 5.0
"""Seconds after which somebody is told that a head is waited for: nodes that begin together need some for that."""

POLL_SECONDS = 0.5
"""Seconds between two looks for a head that does not answer, at most."""

REQUEST_SECONDS = 2.0
"""Seconds in which one who is a head says so."""

SERVER_ERROR = 500

Headers: TypeAlias = Callable[[], client.Headers]
"""What every request carries; asked each time."""

log = logging.getLogger("gymsdk")


async def bind_head(
    host: str,
    port: int,
    *,
    scheme: Scheme = "http",
    listen: str | None = None,
    headers: Headers = auth_headers,
    patience: float = JOIN_SECONDS,
) -> socket.socket | None:
    """Give the socket at which the head of *host* and *port* is to be started here, or `None` where it is to be joined.

    One that answers there is joined; if the address is this machine's own, the socket is bound (at *listen*, if that
    is given); else it is waited for. Raises `GymsdkError` where no head answers within *patience* seconds.
    """
    at = build_url(host, port, scheme)
    waiting = HeadWait(redact_url(at), patience, "name the right host and port")
    while (why := await _check_head(at, headers)) is not None:
        if is_local_host(host):
            try:
                return listener.bind_socket(host if listen is None else listen, port, what="the head")
            except UsageError as error:
                # Perhaps another node of this machine has begun a head a moment ago.
                why = str(error)
        await asyncio.sleep(waiting.next_pause(why))
    return None


class HeadWait:
    """The wait for a head at *place*, *seconds* at most; told of once, after *said*. *cure* is what else helps."""

    def __init__(self, place: str, seconds: float, cure: str, *, said: float = LOG_AFTER_SECONDS) -> None:
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
        return min(self._seconds - passed, random.uniform(POLL_SECONDS / 2, POLL_SECONDS))


def is_local_host(host: str) -> bool:
    """Whether *host* is an address of this machine: whether something can listen there."""
    try:
        listener.bind_socket(host).close()
    except (UsageError, UnicodeError):
        return False
    return True


async def _check_head(at: str, headers: Headers) -> str | None:
    """Give why what is *at* a URL is no head that can be asked, `None` where it is one; raises `GymsdkError`."""
    try:
        answer = await client.get(at + "/nodes", headers=headers(), timeout=REQUEST_SECONDS, retry=client.NO_RETRY)
    except Failed as error:
        return str(error)
    if answer.status >= SERVER_ERROR:
        return f"it answered {answer.status}"
    if not answer.ok or not isinstance(parse_value(answer), dict):
        raise join_error(answer)
    return None


def join_error(answer: HttpResponse) -> GymsdkError:
    """Give why *answer* lets nobody join: it is no head's, or the head refuses."""
    value = parse_value(answer)
    detail = value.get("detail") if isinstance(value, dict) else None
    if answer.ok or answer.status in {404, 405}:
        sentence = f"{answer.host} is no head of gymsdk: it answered {answer.status} at /nodes"
        return GymsdkError(f"{sentence}; name the right one, or choose another port")
    return GymsdkError(f"the head {answer.host} refuses this node: {detail or answer.status}")
