"""Who may use the viewer: a token for each start of it, and headers that keep hostile transcripts from doing harm."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from pydantic import SecretStr
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_PARAMETER = "token"  # noqa: S105  # the name of a parameter

NO_TOKEN = "this viewer needs the token in the address that `gymsdk view` printed; open that address"  # noqa: S105


def build_policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy of the pages.

    Nothing is loaded from elsewhere, no inline script or style runs except *scripts*, and no other page may embed the
    viewer.

    Args:
        scripts: The texts of the inline scripts of the page, such as its import map.
    """
    hashes = "".join(
        f" 'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts
    )
    return (
        f"default-src 'none'; script-src 'self'{hashes}; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def find_inline_scripts(page: str) -> list[str]:
    """Return the texts of the inline scripts of an HTML *page* of our own."""
    return [text for text in re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) if text]


class SecurityMiddleware:
    """ASGI middleware that requires the token, and adds the security headers.

    The token comes as `?token=` of the first address. It becomes a cookie that scripts cannot read, and the browser is
    sent to the address without it, so that it stays in no history. The cookie is named after the port, because cookies
    are shared by all ports of a host.

    Args:
        app: The app.
        token: The token.
        policy: The Content-Security-Policy.
    """

    def __init__(self, app: ASGIApp, token: SecretStr, policy: str) -> None:
        self._app = app
        self._token = token.get_secret_value()
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request with the token on, and answer any other."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
            await send(message)

        answer = self._check(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> Response | None:
        """Return the answer to a request that is not passed on."""
        cookie = _build_cookie_name(scope)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN_PARAMETER]
        if given:
            if not any(self._is_token(value) for value in given):
                return JSONResponse({"detail": NO_TOKEN}, 401)
            rest = urlencode([(name, value) for name, value in query if name != TOKEN_PARAMETER])
            target = "/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else "")
            response = RedirectResponse(target, 303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict", path="/")
            return response
        if any(self._is_token(value) for value in _iter_tokens(scope, cookie)):
            return None
        return JSONResponse({"detail": NO_TOKEN}, 401)

    def _is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode(), self._token.encode())


def _build_cookie_name(scope: Scope) -> str:
    server = scope.get("server") or ("", 0)
    return f"gymsdk-view-{server[1]}"


def _iter_tokens(scope: Scope, cookie: str) -> Iterator[str]:
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        if name == b"authorization" and text.lower().startswith("bearer "):
            yield text[len("bearer ") :].strip()
        elif name == b"cookie":
            try:
                found = SimpleCookie(text).get(cookie)
            except CookieError:
                continue
            if found is not None:
                yield found.value
