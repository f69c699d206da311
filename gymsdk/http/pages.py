"""Recognize requests that a web page of another origin sent, and requests for another host name.

Any page in a browser can send requests to the servers of the browser's machine. The browser names the page in two
headers that scripts cannot change: `Origin` (RFC 6454) and `Sec-Fetch-Site` (W3C Fetch Metadata). Programs do not send
them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from gymsdk.http.tls import DEFAULT_PORTS, WILDCARD_HOSTS, is_loopback

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})

MAX_CHECKED_HOSTS = 64
"""How many `Host` headers of allowed hosts are remembered, so that they are parsed only once."""

UNKNOWN_HOST_MESSAGE = (
    "this server does not answer for the host {name!r}: use 127.0.0.1, or start the server with --host"
)
FOREIGN_PAGE_MESSAGE = (
    "this server does not answer web pages of other sites ({header}: {value!r}); to open a page of this server, enter"
    " its address in the browser"
)

SAME_ORIGIN = b"same-origin"
OWN_SITES = frozenset({SAME_ORIGIN, b"none"})
"""Values of `Sec-Fetch-Site` for a page of the server itself, and for an address that a person entered."""


class Rejection(NamedTuple):
    """The status and the reason of a rejected request."""

    status: int
    reason: str


class PageCheck:
    """Finds requests for another host name, and requests that a page of another origin sent.

    The check of the host name prevents DNS rebinding: another site's host name can resolve to this server, and a
    browser would then treat the server as part of that site. Loopback addresses are always allowed.

    The server's own origin has the host and the port that the client addressed (`Host`), because a forwarded port
    (`ssh -L`) differs from the server's own.

    Args:
        allowed: The server's host names; `None` allows every name.
    """

    def __init__(self, allowed: Iterable[str] | None) -> None:
        self._allowed = None if allowed is None else frozenset(allowed)
        self._checked_hosts: set[bytes] = set()

    def find_rejection(self, headers: Iterable[tuple[bytes, bytes]], scheme: str) -> Rejection | None:
        """Return why a request is rejected, or `None`.

        Args:
            headers: The headers of the request; their names are in lower case.
            scheme: The scheme of the server, `http` or `https`.
        """
        host = origin = site = None
        # Repeated headers are joined: together they name no server and no page.
        for name, value in headers:
            if name == b"host":
                host = value if host is None else host + b"," + value
            elif name == b"origin":
                origin = value if origin is None else origin + b"," + value
            elif name == b"sec-fetch-site":
                site = value if site is None else site + b"," + value
        if host and not self._is_allowed(host):
            return Rejection(421, UNKNOWN_HOST_MESSAGE.format(name=_parse_hostname(host)[:80]))
        # Behind a proxy with TLS, the server's pages have another scheme than the server; the browser knows it.
        schemes = DEFAULT_PORTS if site == SAME_ORIGIN else (scheme,)
        if origin is not None and not any(_is_own_origin(origin, own, host) for own in schemes):
            return _reject_page("Origin", origin)
        if site is not None and site not in OWN_SITES:
            return _reject_page("Sec-Fetch-Site", site)
        return None

    def _is_allowed(self, host: bytes) -> bool:
        if self._allowed is None or host in self._checked_hosts:
            return True
        name = _parse_hostname(host)
        if name not in self._allowed and not is_loopback(name):
            return False
        if len(self._checked_hosts) < MAX_CHECKED_HOSTS:
            self._checked_hosts.add(host)
        return True


def allowed_hosts(*hosts: str) -> frozenset[str] | None:
    """Return the host names of a server that listens at `hosts`; `None` if it listens on all addresses."""
    if WILDCARD_HOSTS & set(hosts):
        return None
    hostname = set() if all(is_loopback(host) or host in LOOPBACK_NAMES for host in hosts) else {socket.gethostname()}
    return frozenset(name.lower() for name in (*hosts, *hostname, *LOOPBACK_NAMES))


def _reject_page(header: str, value: bytes) -> Rejection:
    return Rejection(403, FOREIGN_PAGE_MESSAGE.format(header=header, value=value[:80].decode("latin-1")))


def _parse_hostname(host: bytes) -> str:
    try:
        return (urlsplit("//" + host.decode("latin-1")).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_own_origin(origin: bytes, scheme: str, host: bytes | None) -> bool:
    own = _parse_origin(f"{scheme}://{host.decode('latin-1')}") if host else None
    return own is not None and own == _parse_origin(origin.decode("latin-1"))


def _parse_origin(text: str) -> tuple[str, str, int | None] | None:
    """Return scheme, host and port of an origin, or `None` if *text* is not an origin."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    # An origin has no path, user or second value: `http://127.0.0.1:80@evil.test`, `http://127.0.0.1:80,http://evil.test`.
    if not host or text.lower() != f"{parts.scheme}://{parts.netloc}".lower() or set(parts.netloc) & set("@,"):
        return None
    return parts.scheme, host, DEFAULT_PORTS.get(parts.scheme) if port is None else port
