"""Credentials: the token that says who may ask our servers: read from a file, carried by our own clients."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pydantic import SecretStr

from gymsdk.errors import Failed, UsageError

TOKEN_FILE_VARIABLE = "GYMSDK_TOKEN_FILE"
"""The environment variable that names the file of the token, for servers and clients alike."""

AUTHORIZATION_HEADER = "authorization"

MIN_TOKEN_CHARS = 16
"""Characters that a token has at least."""

MAX_TOKEN_CHARS = 1024
"""Characters that it has at most."""

TOKEN_HINT = "make one with: (umask 077; openssl rand -hex 32 > token.txt)"

UNAUTHORIZED = 401
"""The status of a server that asks for a token."""

log = logging.getLogger("gymsdk")


def read_token(file: Path | str) -> SecretStr:
    """Give the token in *file*, its one line; raises `UsageError` where there is none, or one too easily guessed."""
    try:
        with Path(file).open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                log.warning("%s holds a token that others can read; run: chmod 600 %s", file, file)
            found = opened.read(4 * MAX_TOKEN_CHARS)
    except OSError as error:
        raise UsageError(f"the token file {file} cannot be read ({error.strerror or error}); {TOKEN_HINT}") from None
    text = found.decode("ascii", "replace").strip()
    # The text itself is in no message.
    if len(text) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"the token in {file} has {len(text)} characters and needs at least {MIN_TOKEN_CHARS}; {TOKEN_HINT}"
        )
    if len(text) > MAX_TOKEN_CHARS or not re.fullmatch(r"[!-~]+", text):
        raise UsageError(
            f"{file} must hold one line of at most {MAX_TOKEN_CHARS} plain characters without spaces; {TOKEN_HINT}"
        )
    return SecretStr(text)


def get_process_token(file: Path | str | None = None) -> SecretStr | None:
    """Give this process's token: that in *file*, or else in the file the environment names; `None` where none is named.

    A file is read once.
    """
    named = str(file) if file is not None else os.environ.get(TOKEN_FILE_VARIABLE, "").strip()
    return _read_token_once(os.path.abspath(Path(named).expanduser())) if named else None  # noqa: PTH100 - links stay as they are


@cache
def _read_token_once(file: str) -> SecretStr:
    return read_token(file)


def build_auth_headers(token: SecretStr | None) -> dict[str, SecretStr]:
    """Give what a request to a server of ours carries: the *token*, where there is one."""
    given = token.get_secret_value() if token is not None else ""
    return {AUTHORIZATION_HEADER: SecretStr(f"Bearer {given}")} if given else {}


def resolve_auth_headers(token: SecretStr | str | None) -> dict[str, SecretStr]:
    """Give what requests carry: the *token*, or this process's own where none is given; an empty one is none."""
    if token is None:
        return build_auth_headers(get_process_token())
    return build_auth_headers(token if isinstance(token, SecretStr) else SecretStr(token))


def check_head_url(url: str) -> str:
    """Give the *url* of a head, which anybody may be told; raises `UsageError` where it is none, or says who asks."""
    named = url.rpartition("@")[2]
    if named != url:
        cure = f"leave them out, and have a token in the file that {TOKEN_FILE_VARIABLE} names"
        raise UsageError(f"--head {named}: a name and a password would be seen wherever the head is told of; {cure}")
    if not re.fullmatch(r"https?://[^\s?#]+", url):
        raise UsageError(f"--head {url.partition('?')[0]}: write it as a URL, as in http://127.0.0.1:11000")
    return url.rstrip("/")


def build_unauthorized_error(host: str, *, had_token: bool) -> Failed:
    """Give the failure that *host* asks for a token, where one was *carried*, which is wrong, or none was."""
    cure = f"set {TOKEN_FILE_VARIABLE} to the file that holds it"
    said = f"takes another token; {cure}" if had_token else f"asks for a token; {cure}"
    return Failed(f"{host} {said}", kind="server_unauthorized", stage="host")


MAX_MESSAGE_CHARS = 500
"""How much of a message is kept."""

MIN_DISTINCTIVE_CHARS = 8
"""Characters from which on a secret is one wherever it stands: a shorter one may be a part of any word."""


@contextmanager
def redact_failures(*secrets: SecretStr | None) -> Iterator[None]:
    """Keep *secrets* out of the message of any `Failed` raised inside, and cut the message only then."""
    try:
        yield
    except Failed as error:
        error.args = (redact(str(error), filter(None, secrets))[:MAX_MESSAGE_CHARS],)
        raise


def redact(text: str, secrets: Iterable[SecretStr]) -> str:
    """Give *text* without *secrets*, in whichever way JSON or Python may have written them.

    One of fewer than `TELLING` characters is left out only where it stands by itself: else the key `any` would make
    `m***` of `many`.
    """
    for secret in filter(None, (each.get_secret_value().strip() for each in secrets)):
        for form in {json.dumps(secret)[1:-1], repr(secret)[1:-1], secret.replace("/", r"\/"), secret}:
            text = text.replace(form, "***") if len(secret) >= MIN_DISTINCTIVE_CHARS else _redact_word(text, form)
    return text


def _redact_word(text: str, word: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "***", text)
