"""Trust: whose certificates are believed where something is asked over TLS."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from gymsdk.addresses import is_loopback
from gymsdk.errors import Failed, UsageError

VARIABLE = "GYMSDK_CA_FILE"
"""The environment variable that names a file of certificates to believe beside the system's."""

FIRST = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)

_answering: list[tuple[str, Path, tuple[str, ...]]] = []
"""The hosts at which this process answers over TLS, the certificate it shows there, what else it is called."""


def of(url: str) -> ssl.SSLContext | bool:
    """Give whom to believe at *url*: aiohttp's own choice where no TLS is spoken there."""
    if not url.startswith("https:"):
        return True
    try:
        return at(urlsplit(url).hostname or "")
    except ValueError:
        return True


def at(host: str) -> ssl.SSLContext:
    """Give whom to believe at *host*; raises `UsageError` where a file of certificates is none."""
    believed = os.environ.get(VARIABLE, "").strip()
    near = bool(_answering) and (is_loopback(host) or any(name == host for name, _, _ in _answering))
    own = tuple(dict.fromkeys(file for _, file, also in _answering if near or host in also))
    return _context(believed, own, near)


@contextmanager
def answering(host: str, certificate: Path, also: Iterable[str] = ()) -> Iterator[None]:
    """Show *certificate* at *host* inside the block: it is believed there and on loopback, whatever it is for.

    What a machine tells itself passes no network, and few certificates are for an address of loopback. At what *also*
    are names of it, it is believed where it is for them; nowhere else is it, nor whoever has issued it.
    """
    entry = (host, certificate, tuple(also))
    _answering.append(entry)
    try:
        yield
    finally:
        _answering.remove(entry)


def refused(host: str, error: Exception) -> Failed:
    """Give the failure to believe the certificate that *host* shows."""
    why = getattr(error, "verify_message", "") or str(error)
    cure = f"name its issuer's certificate with {VARIABLE}=FILE, or ask it by a name that its certificate is for"
    return Failed(f"the certificate of {host} is not trusted: {why.rstrip('.')}; {cure}", kind="model_untrusted")


@cache
def _context(believed: str, own: tuple[Path, ...], near: bool) -> ssl.SSLContext:
    # The system's and those of SSL_CERT_FILE.
    context = ssl.create_default_context()
    if believed:
        _load(context, Path(believed).expanduser())
    for file in own:
        _load(context, file, first=True)
    if own:
        # It may have been issued by somebody whom nothing here knows.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not near
    return context


def _load(context: ssl.SSLContext, file: Path, *, first: bool = False) -> None:
    """Have *context* believe the certificates in *file*, or the *first* alone: those behind it are its issuers'."""
    with _read(file):
        if not first:
            context.load_verify_locations(file)
        elif found := FIRST.search(file.read_bytes()):
            context.load_verify_locations(cadata=found[0].decode("ascii"))


@contextmanager
def _read(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise UsageError(f"the certificates in {file} cannot be read ({why}); give a PEM file") from None
