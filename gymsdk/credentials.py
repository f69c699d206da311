"""Credentials: the token that says who may ask our servers: read from a file, carried by our own clients."""

from __future__ import annotations

import logging
import os
import re
import stat
from functools import cache
from pathlib import Path

from pydantic import SecretStr

from gymsdk.errors import Failed, UsageError

VARIABLE = "GYMSDK_TOKEN_FILE"
"""The environment variable that names the file of the token, for servers and clients alike."""

HEADER = "authorization"

LEAST = 16
"""Characters that a token has at least."""

MOST = 1024
"""Characters that it has at most."""

MAKING = "make one with: (umask 077; openssl rand -hex 32 > token.txt)"

UNAUTHORIZED = 401
"""The status of a server that asks for a token."""

log = logging.getLogger("gymsdk")


def token(file: Path | str) -> SecretStr:
    """Give the token in *file*, its one line; raises `UsageError` where there is none, or one too easily guessed."""
    try:
        with Path(file).open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                log.warning("%s holds a token that others can read; run: chmod 600 %s", file, file)
            found = opened.read(4 * MOST)
    except OSError as error:
        raise UsageError(f"the token file {file} cannot be read ({error.strerror or error}); {MAKING}") from None
    text = found.decode("ascii", "replace").strip()
    # The text itself is in no message.
    if len(text) < LEAST:
        raise UsageError(f"the token in {file} has {len(text)} characters and needs at least {LEAST}; {MAKING}")
    if len(text) > MOST or not re.fullmatch(r"[!-~]+", text):
        raise UsageError(f"{file} must hold one line of at most {MOST} plain characters without spaces; {MAKING}")
    return SecretStr(text)


def own(file: Path | str | None = None) -> SecretStr | None:
    """Give this process's token: that in *file*, or else in the file the environment names; `None` where none is named.

    A file is read once.
    """
    named = str(file) if file is not None else os.environ.get(VARIABLE, "").strip()
    return _read(os.path.abspath(Path(named).expanduser())) if named else None  # noqa: PTH100 - links stay as they are


@cache
def _read(file: str) -> SecretStr:
    return token(file)


def headers(token: SecretStr | None) -> dict[str, SecretStr]:
    """Give what a request to a server of ours carries: the *token*, where there is one."""
    given = token.get_secret_value() if token is not None else ""
    return {HEADER: SecretStr(f"Bearer {given}")} if given else {}


def carried(token: SecretStr | str | None) -> dict[str, SecretStr]:
    """Give what requests carry: the *token*, or this process's own where none is given; an empty one is none."""
    if token is None:
        return headers(own())
    return headers(token if isinstance(token, SecretStr) else SecretStr(token))


def head(url: str) -> str:
    """Give the *url* of a head, which anybody may be told; raises `UsageError` where it is none, or says who asks."""
    named = url.rpartition("@")[2]
    if named != url:
        cure = f"leave them out, and have a token in the file that {VARIABLE} names"
        raise UsageError(f"--head {named}: a name and a password would be seen wherever the head is told of; {cure}")
    if not re.fullmatch(r"https?://[^\s?#]+", url):
        raise UsageError(f"--head {url.partition('?')[0]}: write it as a URL, as in http://127.0.0.1:11000")
    return url.rstrip("/")


def refused(host: str, *, had_token: bool) -> Failed:
    """Give the failure that *host* asks for a token, where one was *carried*, which is wrong, or none was."""
    cure = f"set {VARIABLE} to the file that holds it"
    said = f"takes another token; {cure}" if had_token else f"asks for a token; {cure}"
    return Failed(f"{host} {said}", kind="server_unauthorized", stage="host")
