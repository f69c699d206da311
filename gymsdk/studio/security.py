"""Who may use the viewer: a token for each start, and headers that keep hostile transcripts from doing harm."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gymsdk.edge.auth import CHALLENGE_HEADERS, UNAUTHORIZED, is_valid_token

NO_TOKEN = (
    "this viewer needs the token in the address that `gymsdk view` printed; open that address, or send the token as"  # noqa: S105  # a message
    " `Authorization: Bearer TOKEN`"
)
NOT_JSON = "send the body as `Content-Type: application/json`"


def build_policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of the pages.

    Nothing is loaded from elsewhere, no inline script or style runs except *scripts*, and no other page may embed the
    viewer.

    Args:
        scripts: The texts of the inline scripts of the page, such as its import map.
    """
    hashes = "".join(
        f" 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src 'self'{hashes}; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def find_inline_scripts(page: str) -> list[str]:
    """Return the texts of the inline scripts of an HTML *page* of our own."""
    return [text for text in re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) if text]


class SecurityHeaders:
    """ASGI middleware that adds the security headers to every response.

    Args:
        policy: The Content-Security-Policy.
    """

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the headers to the response."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, send_with_headers)


class ApiAccess:
    """ASGI middleware that admits requests with the token in the header `Authorization`, and writes only as JSON.

    A browser adds this header to no request by itself, as it adds cookies, which all ports of a host share.
    """

    def __init__(self, app: ASGIApp, token: SecretStr) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        await (self._find_rejection(Request(scope)) or self._app)(scope, receive, send)

    def _find_rejection(self, request: Request) -> Response | None:
        credentials = [value.encode("latin-1") for value in request.headers.getlist("authorization")]
        if not is_valid_token(credentials, self._token):
            return JSONResponse({"detail": NO_TOKEN}, UNAUTHORIZED, CHALLENGE_HEADERS)
        # A page of another site can send a form, but not JSON, without asking the server first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return JSONResponse({"detail": NOT_JSON}, 415)
        return None
