"""The forward proxies of the environment: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, and `NO_PROXY` for exceptions.

The names may be in lower case, which takes precedence, as for curl. Loopback addresses never go through a proxy.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TypeAlias
from urllib.parse import urlsplit

from gymsdk.http.tls import DEFAULT_PORTS, WILDCARD_HOSTS, is_loopback, redact_url

HTTP_SCHEMES = frozenset(DEFAULT_PORTS)
"""The schemes of the proxies that aiohttp supports."""

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy.

    Attributes:
        url: Its URL, which may contain a user and a password.
        variable: The environment variable that names it.
    """

    url: str = field(repr=False)
    variable: str

    def __str__(self) -> str:
        return f"the proxy {redact_url(self.url).partition('://')[2].rstrip('/')} of {self.variable}"


def find_proxy(url: str, schemes: frozenset[str] = HTTP_SCHEMES) -> Proxy | None:
    """Return the proxy through which requests to *url* go; `None` if they go to the server directly.

    Args:
        url: The URL.
        schemes: The schemes of the proxies that the caller can use; another proxy is ignored with a warning.
    """
    # From the proxy, such an address would be that of the proxy's own machine.
    if _leads_to_loopback(url):
        return None
    scheme = url.partition(":")[0].lower()
    variable, address = _read_variable(f"{scheme}_proxy", "all_proxy")
    return _find_proxy(url, schemes, variable, address, _read_variable("no_proxy")[1]) if address else None


def _read_variable(*names: str) -> tuple[str, str]:
    """Return the first of the environment variables *names* that is set, in lower or upper case, and its value."""
    for name in names:
        # A CGI server sets HTTP_PROXY to the header `Proxy` of a request.
        is_forged = name == "http_proxy" and "REQUEST_METHOD" in os.environ
        for variable in (name,) if is_forged else (name, name.upper()):
            if (value := os.environ.get(variable)) is not None:
                return variable, value.strip()
    return "", ""


@lru_cache(maxsize=1024)
def _find_proxy(url: str, schemes: frozenset[str], variable: str, address: str, exceptions: str) -> Proxy | None:
    host, port = _split_address(url)
    if not host or any(_matches(host, port, entry) for entry in re.split(r"[\s,]+", exceptions)):
        return None
    proxy = Proxy(address if "://" in address else f"http://{address}", variable)
    return proxy if _is_usable(proxy, schemes) else None


def _split_address(url: str) -> tuple[str, int]:
    """Return the host and the port of *url*; the host is empty if the URL is invalid."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", 0


@lru_cache(maxsize=1024)
def _leads_to_loopback(url: str) -> bool:
    host, _ = _split_address(url)
    if host in WILDCARD_HOSTS or host.endswith(".localhost") or is_loopback(host):
        return True
    try:
        # Short forms such as 127.1, which `getaddrinfo` accepts, too.
        return is_loopback(socket.inet_ntoa(socket.inet_aton(host)))
    except OSError:
        return False


def _matches(host: str, port: int, exception: str) -> bool:
    """Whether an entry of `NO_PROXY` names *host*: a host or a domain above it, an address, a network, or `*`."""
    if exception == "*":
        return True
    address = _parse_address(host)
    if address is not None and "/" in exception:
        return _contains(exception, address)
    name, only_port = _split_port(exception.lower())
    if only_port and only_port != str(port):
        return False
    if address is not None:
        return _parse_address(name) == address
    name = name.removeprefix("*").strip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _split_port(exception: str) -> tuple[str, str]:
    """Return the host and the port of an entry of `NO_PROXY`; the port is empty if there is none."""
    match = re.fullmatch(r"\[(?P<v6>.*)\](?::(?P<port6>\d+))?|(?P<name>[^:]*):(?P<port>\d+)", exception)
    if match is None:
        return exception, ""
    return match["v6"] or match["name"] or "", match["port6"] or match["port"] or ""


def _contains(network: str, address: Address) -> bool:
    try:
        # Users write the address of one host with the length of its network, as in 10.0.0.5/8.
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _parse_address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@cache
def _is_usable(proxy: Proxy, schemes: frozenset[str]) -> bool:
    """Whether requests can go through *proxy*; warns once if not."""
    try:
        parts = urlsplit(proxy.url)
        problem = "" if parts.hostname and (parts.port is None or parts.port) else "it is not the URL of a proxy"
    except ValueError:
        problem = "it is not the URL of a proxy"
    if not problem and parts.scheme not in schemes:
        problem = f"{parts.scheme} proxies are not supported"
    if problem:
        log.warning(
            "%s is ignored, and requests go to the servers directly: %s; write http://HOST:PORT, or unset it",
            proxy.variable,
            problem,
        )
    return not problem
