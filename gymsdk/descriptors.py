"""File descriptors: raise the limit of open files, and keep servers responsive when the limit is reached."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

MAX_OPEN_FILES = 65535
"""The soft limit of open files, connections included, that a process requests."""

RESERVED_DESCRIPTORS = 128
"""Descriptors reserved for files, worker processes and the files of environments."""

EXHAUSTION_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process or a machine that temporarily cannot accept another connection."""

ACCEPT_PAUSE_SECONDS = 0.5
"""Seconds after such an error during which a socket accepts no connection. asyncio tries again after 1 second."""

log = logging.getLogger("gymsdk")


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files as far as the hard limit allows, and return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def count_affordable(connections_each: int) -> int:
    """Return how many objects with *connections_each* connections this process can open in addition to its open files.

    The result is at least 1.
    """
    free = raise_open_file_limit() - sum(1 for _ in Path("/dev/fd").iterdir()) - RESERVED_DESCRIPTORS
    return max(free // connections_each, 1)


class ListeningSocket(socket.socket):
    """A listening socket that accepts nothing for `ACCEPT_PAUSE_SECONDS` after it ran out of descriptors.

    Without the pause, asyncio tries to accept once per place in the backlog and logs a traceback each time.
    """

    _paused_until = 0.0

    @classmethod
    def from_socket(cls, sock: socket.socket) -> ListeningSocket:
        """Return *sock* as a socket of this class; *sock* itself is detached."""
        return cls(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raises `BlockingIOError` during the pause."""
        if time.monotonic() < self._paused_until:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        try:
            return super().accept()
        except OSError as error:
            if error.errno in EXHAUSTION_ERRNOS:
                self._paused_until = time.monotonic() + ACCEPT_PAUSE_SECONDS
            raise


def install_exhaustion_handler(loop: asyncio.AbstractEventLoop) -> None:
    """Make *loop* log one line per second, without a traceback, while it cannot accept connections."""
    if not isinstance(loop.get_exception_handler(), _ExhaustionHandler):
        loop.set_exception_handler(_ExhaustionHandler(loop.get_exception_handler()))


class _ExhaustionHandler:
    """An event loop's exception handler that passes every other error to the *previous* handler."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self._logged_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_accept_error = "accept" in context.get("message", "")
        if not (is_accept_error and isinstance(error, OSError) and error.errno in EXHAUSTION_ERRNOS):
            if self._previous:
                self._previous(loop, context)
            else:
                loop.default_exception_handler(context)
            return
        if time.monotonic() < self._logged_at + 1.0:
            return
        self._logged_at = time.monotonic()
        log.warning(
            "no further connection can be accepted (%s): this process may have %d files open; new clients wait until"
            " others disconnect; raise the limit with `ulimit -Hn`, or send fewer requests at once",
            error.strerror,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
