"""A place: where the head is, as a command's words or the folder's `env.yaml` say."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gymsdk import config
from gymsdk.credentials import TOKEN_FILE_VARIABLE
from gymsdk.http.tls import get_reachable_host
from gymsdk.servers.service import build_url


def head(words: Sequence[str]) -> str:
    """Give the head's URL; what else is configured has the token with which it is asked. Raises `UsageError`."""
    found = config.load_config([], words)
    if found.token_file is not None:
        os.environ.setdefault(TOKEN_FILE_VARIABLE, str(found.token_file))
    host = found.head.host
    return build_url(get_reachable_host(host), found.head.port, "https" if found.tls else "http")
