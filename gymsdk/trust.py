"""Trust: whose certificates are believed where something is asked over TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from gymsdk.addresses import is_loopback
from gymsdk.errors import Failed, UsageError

VARIABLE = "GYMSDK_CA_FILE"
"""The environment variable that names a file of certificates to believe beside the system's."""

_answering: list[tuple[str, Path]] = []
"""The hosts at which this process answers over TLS, and the certificate it shows there."""


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
    own = tuple(dict.fromkeys(certificate for _, certificate in _answering))
    near = bool(own) and (is_loopback(host) or any(name == host for name, _ in _answering))
    return _context(believed, own, near)


@contextmanager
def answering(host: str, certificate: Path) -> Iterator[None]:
    """Show *certificate* at *host* inside the block: it is believed, and at *host* and on loopback whatever it is for.

    Who shows it elsewhere is one of ours too. What a machine tells itself passes no network, and few certificates are
    for an address of loopback.
    """
    entry = (host, certificate)
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
    for file in (*([Path(believed).expanduser()] if believed else []), *own):
        try:
            context.load_verify_locations(file)
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or str(error)
            raise UsageError(f"the certificates in {file} cannot be read ({why}); give a PEM file") from None
    if own:
        # It may have been issued by somebody whom nothing here knows.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not near
    return context
