"""A place: where the head is, as a command's words or the folder's `env.yaml` say."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gymsdk import configuration
from gymsdk.addresses import near
from gymsdk.credentials import VARIABLE
from gymsdk.servers.nodes.service import url


def head(words: Sequence[str]) -> str:
    """Give the head's URL; what else is configured has the token with which it is asked. Raises `UsageError`."""
    found = configuration.read([], words)
    if found.token_file is not None:
        os.environ.setdefault(VARIABLE, str(found.token_file))
    host = found.head.host
    return url(near(host), found.head.port, "https" if found.tls else "http")
