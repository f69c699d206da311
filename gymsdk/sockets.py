"""Accept connections on a listening socket, in the same way on each event loop, and raise the limit of open files."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

SOCKET_BACKLOG = 4096
"""Length of the socket's accept queue: a client that finds it full retries only after a second."""

MAX_ACCEPTS_PER_PASS = 128
"""Connections accepted in one pass of the event loop."""

EXHAUSTION_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process or a machine that temporarily cannot accept another connection."""

ACCEPT_PAUSE_SECONDS = 0.5
"""Seconds after such an error during which a socket accepts no connection."""

WARNING_INTERVAL_SECONDS = 1.0
"""Seconds between two warnings that no connection can be accepted."""

log = logging.getLogger("gymsdk")


class ExhaustionLog:
    """Warns, at most once in `WARNING_INTERVAL_SECONDS`, that this process cannot accept a connection."""

    def __init__(self) -> None:
        self._warned_at = float("-inf")

    def record(self, error: OSError) -> None:
        """Warn of *error*, one of `EXHAUSTION_ERRNOS`."""
        if time.monotonic() < self._warned_at + WARNING_INTERVAL_SECONDS:
            return
        self._warned_at = time.monotonic()
        log.warning(
            "no further connection can be accepted (%s): this process may have %d files open; new clients wait until"
            " others disconnect; raise the limit with `ulimit -Hn`, or send fewer requests at once",
            error.strerror,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


class Acceptor:
    """Accepts connections, at most `MAX_ACCEPTS_PER_PASS` in one pass of the event loop.

    The servers of the event loops do not suit thousands of clients that connect at once: asyncio's accepts the whole
    backlog in one pass, and uvloop's accepts a single connection in each pass.

    Args:
        sock: The listening socket. `close` leaves it open.
        create_protocol: Creates the protocol of a connection.
        context: The TLS context, for a socket with TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._create_protocol = create_protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._exhaustion_log = ExhaustionLog()

    def open(self) -> None:
        """Begin to accept connections."""
        self._sock.listen(SOCKET_BACKLOG)
        self._sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no further connection, and drop connections with an unfinished TLS handshake."""
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._connecting:
            task.cancel()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_PER_PASS):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in EXHAUSTION_ERRNOS:
                    raise
                self._wait_for_descriptors(error)
                return
            self.adopt(connection)

    def adopt(self, connection: socket.socket) -> None:
        """Serve *connection*, which this or another process has accepted."""
        task = self._loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(partial(self._finish, connection))

    def _finish(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connecting.discard(task)
        # The event loop closes a connection during its handshake, but not if the task is cancelled before it begins.
        if task.cancelled():
            connection.close()

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._create_protocol, connection, ssl=self._context)
        except OSError as error:  # the client has disconnected, or its TLS handshake failed
            log.debug("a connection was not accepted: %s", error)
            connection.close()

    def _wait_for_descriptors(self, error: OSError) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume)
        self._exhaustion_log.record(error)


MAX_OPEN_FILES = 65535
"""The soft limit of open files, connections included, that a process requests."""

RESERVED_DESCRIPTORS = 128
"""Descriptors reserved for files, worker processes and the files of environments."""


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
