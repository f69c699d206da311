"""Trust: whose certificates are believed where something is asked over TLS."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from gymsdk.errors import Failed, UsageError

WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # told apart, not bound here
"""Hosts that stand for all of a machine's."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches *host*."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def get_reachable_host(host: str) -> str:
    """Give the host at which this machine reaches what listens at *host*."""
    if host not in WILDCARD_HOSTS:
        return host
    return "::1" if ":" in host else "127.0.0.1"


def redact_url(text: str) -> str:
    """Give *text* without what a URL in it says of who asks: a user, a password, a query."""
    return re.sub(r"(?<=://)[^/@\s]+@|(?<=\S)\?\S*", "", text) if "://" in text else text


def split_addresses(given: str | Iterable[str]) -> tuple[str, ...]:
    """Give the addresses *given*, each once: texts, any of which may name several, separated by commas."""
    texts = [given] if isinstance(given, str) else given
    return tuple(dict.fromkeys(each.strip() for text in texts for each in text.split(",") if each.strip()))


CA_FILE_VARIABLE = "GYMSDK_CA_FILE"
"""The environment variable that names a file of certificates to believe beside the system's."""

CERTIFICATE_PATTERN = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

_served_certificates: list[tuple[str, Path, tuple[str, ...]]] = []
"""The hosts at which this process answers over TLS, the certificate it shows there, what else it is called."""


def get_ssl_for_url(url: str) -> ssl.SSLContext | bool:
    """Give whom to believe at *url*: aiohttp's own choice where no TLS is spoken there."""
    if not url.startswith("https:"):
        return True
    try:
        return get_ssl_context(urlsplit(url).hostname or "")
    except ValueError:
        return True


def get_ssl_context(host: str) -> ssl.SSLContext:
    """Give whom to believe at *host*; raises `UsageError` where a file of certificates is none."""
    believed = os.environ.get(CA_FILE_VARIABLE, "").strip()
    near = bool(_served_certificates) and (
        is_loopback(host) or any(name == host for name, _, _ in _served_certificates)
    )
    own = tuple(dict.fromkeys(file for _, file, also in _served_certificates if near or host in also))
    return _create_context(believed, own, near)


@contextmanager
def trust_own_certificate(host: str, certificate: Path, also: Iterable[str] = ()) -> Iterator[None]:
    """Show *certificate* at *host* inside the block: it is believed there and on loopback, whatever it is for.

    What a machine tells itself passes no network, and few certificates are for an address of loopback. At what *also*
    are names of it, it is believed where it is for them; nowhere else is it, nor whoever has issued it.
    """
    entry = (host, certificate, tuple(also))
    _served_certificates.append(entry)
    try:
        yield
    finally:
        _served_certificates.remove(entry)


def build_untrusted_error(host: str, error: Exception) -> Failed:
    """Give the failure to believe the certificate that *host* shows."""
    why = getattr(error, "verify_message", "") or str(error)
    cure = (
        f"name its issuer's certificate with {CA_FILE_VARIABLE}=FILE, or ask it by a name that its certificate is for"
    )
    return Failed(f"the certificate of {host} is not trusted: {why.rstrip('.')}; {cure}", kind="model_untrusted")


@cache
def _create_context(believed: str, own: tuple[Path, ...], near: bool) -> ssl.SSLContext:
    # The system's and those of SSL_CERT_FILE.
    context = ssl.create_default_context()
    if believed:
        _load_certificates(context, Path(believed).expanduser())
    for file in own:
        _load_certificates(context, file, first=True)
    if own:
        # It may have been issued by somebody whom nothing here knows.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not near
    return context


def _load_certificates(context: ssl.SSLContext, file: Path, *, first: bool = False) -> None:
    """Have *context* believe the certificates in *file*, or the *first* alone: those behind it are its issuers'."""
    with _convert_read_errors(file):
        if not first:
            context.load_verify_locations(file)
        elif found := CERTIFICATE_PATTERN.search(file.read_bytes()):
            context.load_verify_locations(cadata=found[0].decode("ascii"))


@contextmanager
def _convert_read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise UsageError(f"the certificates in {file} cannot be read ({why}); give a PEM file") from None
