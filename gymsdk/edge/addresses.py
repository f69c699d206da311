"""The addresses at which servers listen: sockets, ports, and the host that clients are told."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection

from gymsdk.errors import UsageError
from gymsdk.http.tls import get_reachable_host
from gymsdk.sockets import SOCKET_BACKLOG

PROBE_SECONDS = 2.0
"""Seconds that a connection to a server's advertised address may take."""


def bind_socket(host: str, port: int = 0, *, what: str = "a server") -> socket.socket:
    """Create a listening socket.

    Args:
        host: The address or host name.
        port: The port; 0 for any free port.
        what: The server, for the error message.

    Raises:
        UsageError: The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # `create_server` sets SO_REUSEADDR, so connections of a killed process do not block its port.
        listener = socket.create_server((host, port), family=family, backlog=SOCKET_BACKLOG)
    except OSError as error:
        raise UsageError(f"{what} cannot listen: {_format_bind_error(host, port, error)}") from None
    # Accepted sockets inherit the option. Without it, a response in two writes takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def bind_socket_in_range(
    host: str, low: int, high: int, *, but: Collection[int] = (), what: str = "a server"
) -> socket.socket:
    """Create a listening socket on a random free port from `low` to `high`.

    Args:
        host: The address or host name.
        low: The first port.
        high: The last port.
        but: Ports to leave out.
        what: The server, for the error message.

    Raises:
        UsageError: No port is free.
    """
    ports = [port for port in range(low, high + 1) if port not in but]
    for port in random.sample(ports, len(ports)):
        try:
            return bind_socket(host, port, what=what)
        except UsageError:
            continue
    raise UsageError(f"{what} cannot listen: no port of {host} from {low} to {high} is free; widen the range")


def is_local_host(host: str) -> bool:
    """Return whether `host` is an address of this machine, so that a server can listen there."""
    try:
        bind_socket(host).close()
    except (UsageError, UnicodeError):
        return False
    return True


def check_advertised(what: str, advertised: str | None, host: str, port: int) -> None:
    """Check that clients reach a server at its advertised host, if that is an address of this machine.

    Args:
        what: The server, for the error message.
        advertised: The host in the addresses for clients, if the server listens at another.
        host: The host on which the server listens.
        port: Its port.

    Raises:
        UsageError: Nothing listens at the advertised host.
    """
    # Of another address, such as that of a router that forwards the port, this machine can tell nothing.
    if advertised is None or advertised == host or not is_local_host(advertised):
        return
    try:
        # The socket takes connections as soon as it is bound.
        socket.create_connection((get_reachable_host(advertised), port), PROBE_SECONDS).close()
    except OSError:
        raise UsageError(
            f"{what} listens at {host}, but clients are told {advertised}, where nothing listens on port {port}; set"
            f" default_host or the server's host (--host) to {advertised}, or leave out advertise_host"
            " (--advertise-host)"
        ) from None


def socket_port(at: socket.socket) -> int:
    """Return the port of a listening socket."""
    port: int = at.getsockname()[1]
    return port


def socket_host(at: socket.socket, configured: str) -> str:
    """Return a listening socket's host: the configured name if it resolves to the address, else the address."""
    address: str = at.getsockname()[0]
    if address == configured or not configured:
        return configured
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(configured, None)}
    except OSError:
        return address
    return configured if address in addresses else address


def _format_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; stop the process that listens there, or choose another port"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"this user may not use port {port} of {host}; choose a port above 1023"
    return f"{host} is not an address of this machine ({error.strerror or error}); listen on 127.0.0.1"
