"""Safety: what keeps a server from those who do not belong there, and from what is too much for it."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import ssl
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gymsdk import credentials
from gymsdk.convert.api import ApiError
from gymsdk.errors import UsageError
from gymsdk.http.tls import is_loopback
from gymsdk.jsonl import dump_json
from gymsdk.servers import app, middleware, routing
from gymsdk.servers.app import HEALTH_PATHS, json_response
from gymsdk.servers.routing import App, Receive, Scope, Send
from gymsdk.servers.service import INSTANCE_ID_PATTERN, Scheme
from gymsdk.types import Item

INSECURE_VARIABLE = "GYMSDK_INSECURE"
"""The environment variable that lets anybody ask who reaches the servers."""

UNAUTHORIZED = credentials.UNAUTHORIZED
TOKEN_HEADERS = frozenset({b"authorization", b"x-api-key"})
"""The headers that may bring the token: HTTP's own, and the one of Anthropic's SDK."""

BEARER_PREFIX = b"bearer "
CHALLENGE_HEADERS = {"www-authenticate": "Bearer"}
UNAUTHORIZED_MESSAGE = (
    "this server asks for a token, and the request brought {what}: send it as `Authorization: Bearer TOKEN`;"
    f" gymsdk's own clients do where {credentials.TOKEN_FILE_VARIABLE} names the file that holds it"
)

PUBLIC_PATHS = frozenset({*HEALTH_PATHS, "/readyz"})
"""Where those ask who look whether a server is there: a head, a balancer. They mostly bring no token."""


class AuthMiddleware:
    """Lets through to *app* what brings the *token*, which nothing behind is shown."""

    def __init__(self, app: App, token: SecretStr) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "lifespan":
            brought = [value for name, value in scope["headers"] if name in TOKEN_HEADERS]
            if not is_valid_token(brought, self._token):
                # The refusal tells them what they want to know.
                looking = not brought and scope["path"] in PUBLIC_PATHS
                routing.record_rejection(scope, UNAUTHORIZED, scope["path"] if looking else routing.REJECTED_ROUTE)
                told = build_unauthorized_body(scope["path"], wrong=bool(brought))
                await json_response(told, status=UNAUTHORIZED, headers=CHALLENGE_HEADERS)(scope, receive, send)
                return
            scope["headers"] = [each for each in scope["headers"] if each[0] not in TOKEN_HEADERS]
        await self._app(scope, receive, send)


def is_valid_token(brought: Iterable[bytes], token: SecretStr) -> bool:
    """Whether one of the headers *brought* holds the *token*; how long that takes does not tell how nearly."""
    expected = token.get_secret_value().encode()
    # All of them, for the same reason.
    return any([hmac.compare_digest(_strip_scheme(value), expected) for value in brought])  # noqa: C419


def _strip_scheme(value: bytes) -> bytes:
    return (
        value[len(BEARER_PREFIX) :].strip() if value[: len(BEARER_PREFIX)].lower() == BEARER_PREFIX else value.strip()
    )


def build_unauthorized_body(path: str, *, wrong: bool) -> Item:
    """Give the body that refuses a request for *path*, in the form that the clients of that path read."""
    sentence = UNAUTHORIZED_MESSAGE.format(what="a wrong one" if wrong else "none")
    return middleware.build_error_body(path, ApiError(UNAUTHORIZED, sentence, code="invalid_api_key"))


def check_exposure(host: str, token: SecretStr | None, *, insecure: bool) -> None:
    """Refuse to listen at *host* where others reach it and nobody is asked for a *token*; raises `UsageError`."""
    if token is not None or insecure or is_loopback(host):
        return
    raise UsageError(
        f"anybody who reaches {host or '0.0.0.0'!r} could use these servers, which ask for no token; give them one"  # noqa: S104  # told, not bound
        " with --token-file FILE, or let anybody in with --insecure, or listen on 127.0.0.1"
    )


def is_insecure_allowed() -> bool:
    """Whether the environment lets anybody in; raises `UsageError` where it says neither yes nor no."""
    said = os.environ.get(INSECURE_VARIABLE, "").strip().lower()
    if said in {"1", "true", "yes", "on"}:
        return True
    if said in {"", "0", "false", "no", "off"}:
        return False
    raise UsageError(f"{INSECURE_VARIABLE} is {said!r}; write 1 to let anybody in, or leave it out")


BROKEN_MESSAGE = "the server broke on this request; its log says how"

UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]")
"""What may not stand in a cookie's name."""


def cookie_name(kind: str, name: str) -> str:
    """Give the name of the cookie of the server *name* of a *kind*, as clients of NeMo Gym know it."""
    return f"{kind}___{UNSAFE_CHARACTERS.sub('_', name)}"


TOKEN_PATTERN = re.compile(rf"(?:(?P<instance>{INSTANCE_ID_PATTERN})\.)?[A-Za-z0-9_-]{{32}}|lost\.[A-Za-z0-9_-]{{32}}")
"""What the token of a session is like, or of one that was lost; what is sent to those who have none is not."""


class CookieMiddleware:
    """Gives a request the token in its cookie *name*, if it is *known*, and every answer the token to go on with.

    Some clients keep only the cookies of the last answer, so errors have it too. A handler sets a new token in
    `scope["state"]["token"]`. Who has no session is given a token that nobody has had before, and none is adopted;
    `scope["state"]["lost"]` says that there was one, which its client believes in until it opens another.
    """

    def __init__(self, app: App, name: str, known: Callable[[str], bool], lasts: float) -> None:
        self._app = app
        self._name = name
        self._known = known
        self._attributes = f"Path=/; Max-Age={max(1, round(lasts))}; HttpOnly; SameSite=lax"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        brought = list(tokens_in_request(scope, self._name))
        state["token"] = next(filter(self._known, brought), None)
        state["lost"] = state["token"] is None and any(map(TOKEN_PATTERN.fullmatch, brought))
        begun = False

        async def setting(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (b"set-cookie", self._build_cookie(state))]
            await send(message)

        try:
            await self._app(scope, receive, setting)
        except Exception:
            if not begun:
                await _send_broken(setting)
            # A bug: the server's own log has it.
            raise

    def _build_cookie(self, state: MutableMapping[str, Any]) -> bytes:
        token = state["token"]
        if token is None or not self._known(token):
            token = f"{'lost' if state['lost'] and token is None else 'none'}.{secrets.token_urlsafe(24)}"
        return f"{self._name}={token}; {self._attributes}".encode()


def tokens_in_request(scope: Scope, cookie: str) -> Iterator[str]:
    """Yield the tokens that a request brings in the *cookie* of that name."""
    for header, value in scope["headers"]:
        if header == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                name, _, token = pair.strip().partition("=")
                if name == cookie:
                    yield token.strip('"')


def parse_instance(token: str) -> str | None:
    """Give which instance has the session of *token*, `None` where it does not say."""
    found = TOKEN_PATTERN.fullmatch(token)
    return found["instance"] if found else None


async def _send_broken(send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": dump_json({"detail": BROKEN_MESSAGE})})


MAX_HEADER_BYTES = 128 * 2**10
MAX_HEADERS = 256
MAX_CONNECTIONS = 20_000


class Limits(BaseModel):
    """What one server takes: bytes of a *body*, bytes of all *header* lines, how many *headers* and *connections*.

    *bodies* are the bytes that the large bodies of all requests under way may take in memory together, in all servers
    of the process; `None` is a quarter of the memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    body: int = Field(app.MAX_BODY_BYTES, ge=1024)
    bodies: int | None = Field(None, ge=1024)
    header: int = Field(MAX_HEADER_BYTES, ge=1024)
    headers: int = Field(MAX_HEADERS, ge=16)
    connections: int = Field(MAX_CONNECTIONS, ge=1)

    def exceeds_header_limits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the *headers* of a request are too many, or too long."""
        # What came in one piece was never incomplete, which is all that the parser bounds.
        return len(headers) > self.headers or sum(len(name) + len(value) for name, value in headers) > self.header


class Tls(BaseModel):
    """The *certificate* a server shows, with those that lead to its issuer's, and its *key*: PEM files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path
    key: Path

    def create_ssl_context(self) -> ssl.SSLContext:
        """Give what TLS is spoken by; raises `UsageError` where the files are no certificate and its key."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        for file in (self.certificate, self.key):
            if not file.is_file():
                raise UsageError(f"there is no file {file}; --tls-cert and --tls-key name PEM files")
        try:
            # A key under a password would ask for it on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=_reject_password)
        except _PasswordRequired:
            raise UsageError(f"the key in {self.key} needs a password; give one that needs none") from None
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "reason", None) or error.strerror or error
            files = f"the certificate {self.certificate} and the key {self.key}"
            raise UsageError(f"{files} cannot be used ({why}); give PEM files that belong together") from None
        return context


class _PasswordRequired(Exception):
    """A key asks for its password."""


def _reject_password() -> str:
    raise _PasswordRequired


class Security(BaseModel):
    """Who may ask a server, what is spoken, what it takes: if nothing is said, everybody, in the open, the usual."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: SecretStr | None = None
    tls: Tls | None = None
    limits: Limits = Limits()

    @property
    def scheme(self) -> Scheme:
        """What is spoken."""
        return "http" if self.tls is None else "https"


NO_SECURITY = Security()
"""Of a server that anybody may ask who reaches it."""
