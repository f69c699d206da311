"""Finds the head that this node should join, or decides to start one here."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import TypeAlias

from gymsdk.client import parse_value
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.http import client
from gymsdk.http.backoff import add_jitter
from gymsdk.http.client import HttpResponse
from gymsdk.http.tls import redact_url
from gymsdk.servers import listener
from gymsdk.servers.instances import auth_headers
from gymsdk.servers.service import Scheme, build_url

JOIN_SECONDS = 60.0
"""Seconds to wait for a head."""

LOG_AFTER_SECONDS = 5.0
"""Seconds of waiting before a log line; nodes that start together need a moment."""

POLL_SECONDS = 0.5
"""Longest pause between two attempts, in seconds."""

REQUEST_SECONDS = 2.0
"""Timeout of a request to the head, in seconds."""

SERVER_ERROR = 500

Headers: TypeAlias = Callable[[], client.Headers]
"""Returns the headers of each request."""

log = logging.getLogger("gymsdk")


async def bind_head(
    host: str,
    port: int,
    *,
    scheme: Scheme = "http",
    listen: str | None = None,
    headers: Headers = auth_headers,
    timeout_seconds: float = JOIN_SECONDS,
) -> socket.socket | None:
    """Return the socket for a head to start here, or `None` if a head answers that this node should join.

    If a head answers, it is joined. Otherwise, if the address belongs to this machine, its port is bound. Otherwise the
    function waits for the head.

    Args:
        host: The head's host.
        port: The head's port.
        scheme: The URL scheme.
        listen: The host to bind, if it differs from `host`.
        headers: Returns the headers of each request.
        timeout_seconds: Seconds to wait.

    Raises:
        GymsdkError: No head answers in time, or it rejects this node.
    """
    head_url = build_url(host, port, scheme)
    wait = HeadWait(redact_url(head_url), timeout_seconds, "name the right host and port")
    while (reason := await _check_head(head_url, headers)) is not None:
        if is_local_host(host):
            try:
                return listener.bind_socket(host if listen is None else listen, port, what="the head")
            except UsageError as error:
                # Another node of this machine may have just started a head.
                reason = str(error)
        await asyncio.sleep(wait.next_pause(reason))
    return None


class HeadWait:
    """A bounded wait for a head, logged once.

    Args:
        place: The head's URL.
        seconds: The longest wait.
        cure: What the user can do, for the error message.
        log_after: Seconds before the log line.
    """

    def __init__(self, place: str, seconds: float, cure: str, *, log_after: float = LOG_AFTER_SECONDS) -> None:
        self._place = place
        self._seconds = seconds
        self._cure = cure
        self._said = log_after
        self._began = time.monotonic()
        self._is_told = False

    def next_pause(self, reason: str) -> float:
        """Return the seconds until the next attempt.

        Raises:
            GymsdkError: The wait is over; `reason` is the last reason.
        """
        elapsed = time.monotonic() - self._began
        if elapsed >= self._seconds:
            sentence = f"no head answers at {self._place} within {self._seconds:g} seconds ({reason})"
            raise GymsdkError(f"{sentence}; start a head there, or {self._cure}")
        if elapsed >= self._said and not self._is_told:
            self._is_told = True
            log.warning(
                "no head answers at %s yet (%s); waiting for it for at most %g s", self._place, reason, self._seconds
            )
        return min(self._seconds - elapsed, add_jitter(POLL_SECONDS))


def is_local_host(host: str) -> bool:
    """Return whether `host` is an address of this machine, so that a server can listen there."""
    try:
        listener.bind_socket(host).close()
    except (UsageError, UnicodeError):
        return False
    return True


async def _check_head(head_url: str, headers: Headers) -> str | None:
    """Return why no head answers at a URL, or `None` if one does.

    Raises:
        GymsdkError: Another kind of server answers, or the head rejects the request.
    """
    try:
        answer = await client.get(
            head_url + "/nodes", headers=headers(), timeout=REQUEST_SECONDS, retry=client.NO_RETRY
        )
    except Failed as error:
        return str(error)
    if answer.status >= SERVER_ERROR:
        return f"it answered {answer.status}"
    if not answer.ok or not isinstance(parse_value(answer), dict):
        raise join_error(answer)
    return None


def join_error(answer: HttpResponse) -> GymsdkError:
    """Build the error for an answer that is not a head's, or rejects this node."""
    value = parse_value(answer)
    detail = value.get("detail") if isinstance(value, dict) else None
    if answer.ok or answer.status in {404, 405}:
        sentence = f"{answer.host} is not a gymsdk head: it answered {answer.status} at /nodes"
        return GymsdkError(f"{sentence}; use the address of a gymsdk head, or choose another port")
    return GymsdkError(f"the head {answer.host} refuses this node: {detail or answer.status}")
