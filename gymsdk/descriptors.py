"""File descriptors: how many this process may have open, and what happens once they are used up."""

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
"""Open files, and connections with them, that a process asks for at most."""

RESERVED_DESCRIPTORS = 128
"""Descriptors kept for files, worker processes and what an environment opens by itself."""

EXHAUSTION_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process or a machine that cannot accept another connection for now."""

ACCEPT_PAUSE_SECONDS = 0.5
"""Seconds after such an error in which a socket accepts nothing. asyncio tries again after 1 second."""

log = logging.getLogger("gymsdk")


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files as far as the hard limit allows, and give the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def count_affordable(connections_each: int) -> int:
    """Give how many things of *each* so many connections this process can have open beside what it has open now."""
    free = raise_open_file_limit() - sum(1 for _ in Path("/dev/fd").iterdir()) - RESERVED_DESCRIPTORS
    return max(free // connections_each, 1)


class ListeningSocket(socket.socket):
    """A socket that listens, and accepts nothing for `PAUSE` seconds after it ran out of descriptors.

    Without the pause, asyncio tries to accept once for each place in the backlog, and logs a traceback each time.
    """

    _paused_until = 0.0

    @classmethod
    def from_socket(cls, at: socket.socket) -> ListeningSocket:
        """Give the socket *at* as one of this class; *at* itself is detached."""
        return cls(at.family, at.type, at.proto, fileno=at.detach())

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
    """Have *loop* log one line a second at most, without a traceback, while it cannot accept connections."""
    if not isinstance(loop.get_exception_handler(), _ExhaustionHandler):
        loop.set_exception_handler(_ExhaustionHandler(loop.get_exception_handler()))


class _ExhaustionHandler:
    """An exception handler of an event loop: *otherwise* handles what is no failure to accept."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise
        self._logged = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (
            isinstance(error, OSError) and error.errno in EXHAUSTION_ERRNOS and "accept" in context.get("message", "")
        ):
            if self._otherwise:
                self._otherwise(loop, context)
            else:
                loop.default_exception_handler(context)
            return
        if time.monotonic() < self._logged + 1.0:
            return
        self._logged = time.monotonic()
        log.warning(
            "no further connection can be accepted (%s): this process may have %d files open; new clients wait until"
            " others leave; raise the limit with `ulimit -Hn`, or let clients send less at once",
            error.strerror,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
