"""Auth: who may ask a server at all: whoever brings its token, whatever is asked for."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable

from pydantic import SecretStr

from gymsdk import credentials
from gymsdk.addresses import is_loopback
from gymsdk.convert.faces.face import Trouble
from gymsdk.errors import UsageError
from gymsdk.servers.app import HEALTH, answer
from gymsdk.servers.door import doorstep, refusals
from gymsdk.servers.door.routing import App, Receive, Scope, Send
from gymsdk.transcript import Item

INSECURE = "GYMSDK_INSECURE"
"""The environment variable that lets anybody ask who reaches the servers."""

STATUS = credentials.UNAUTHORIZED
NAMES = frozenset({b"authorization", b"x-api-key"})
"""The headers that may bring the token: HTTP's own, and the one of Anthropic's SDK."""

SCHEME = b"bearer "
CHALLENGE = {"www-authenticate": "Bearer"}
SENTENCE = (
    "this server asks for a token, and the request brought {what}: send it as `Authorization: Bearer TOKEN`;"
    f" gymsdk's own clients do where {credentials.VARIABLE} names the file that holds it"
)

LOOKS = frozenset({*HEALTH, "/readyz"})
"""Where those ask who look whether a server is there: a head, a balancer. They mostly bring no token."""


class Auth:
    """Lets through to *app* what brings the *token*, which nothing behind is shown."""

    def __init__(self, app: App, token: SecretStr) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "lifespan":
            brought = [value for name, value in scope["headers"] if name in NAMES]
            if not fits(brought, self._token):
                # The refusal tells them what they want to know.
                looking = not brought and scope["path"] in LOOKS
                doorstep.refused(scope, STATUS, scope["path"] if looking else doorstep.REFUSED)
                told = refusal(scope["path"], wrong=bool(brought))
                await answer(told, status=STATUS, headers=CHALLENGE)(scope, receive, send)
                return
            scope["headers"] = [each for each in scope["headers"] if each[0] not in NAMES]
        await self._app(scope, receive, send)


def fits(brought: Iterable[bytes], token: SecretStr) -> bool:
    """Whether one of the headers *brought* holds the *token*; how long that takes does not tell how nearly."""
    expected = token.get_secret_value().encode()
    # All of them, for the same reason.
    return any([hmac.compare_digest(_bare(value), expected) for value in brought])  # noqa: C419


def _bare(value: bytes) -> bytes:
    return value[len(SCHEME) :].strip() if value[: len(SCHEME)].lower() == SCHEME else value.strip()


def refusal(path: str, *, wrong: bool) -> Item:
    """Give the body that refuses a request for *path*, in the form that the clients of that path read."""
    sentence = SENTENCE.format(what="a wrong one" if wrong else "none")
    return refusals.refusal(path, Trouble(STATUS, sentence, code="invalid_api_key"))


def check(host: str, token: SecretStr | None, *, insecure: bool) -> None:
    """Refuse to listen at *host* where others reach it and nobody is asked for a *token*; raises `UsageError`."""
    if token is not None or insecure or is_loopback(host):
        return
    raise UsageError(
        f"anybody who reaches {host or '0.0.0.0'!r} could use these servers, which ask for no token; give them one"  # noqa: S104  # told, not bound
        " with --token-file FILE, or let anybody in with --insecure, or listen on 127.0.0.1"
    )


def insecure() -> bool:
    """Whether the environment lets anybody in; raises `UsageError` where it says neither yes nor no."""
    said = os.environ.get(INSECURE, "").strip().lower()
    if said in {"1", "true", "yes", "on"}:
        return True
    if said in {"", "0", "false", "no", "off"}:
        return False
    raise UsageError(f"{INSECURE} is {said!r}; write 1 to let anybody in, or leave it out")
