"""A refusal: what is said before any route is asked, in the form that the clients of the path read."""

from __future__ import annotations

from gymsdk.convert.faces import anthropic_errors, errors
from gymsdk.convert.faces.face import Trouble
from gymsdk.servers.door.routing import PREFIX
from gymsdk.transcript import Item

STOPPED = Trouble(503, "the server has been stopped; ask again when it is back", code="server_stopped")
"""What those are told whose requests its end cuts short."""


def refusal(path: str, trouble: Trouble, *, anthropic: bool = False) -> Item:
    """Give the body that tells those who ask for *path* of *trouble*.

    Beneath `/v1/` that is the form of its API; where no path says which, of Anthropic's where the client is one of
    theirs, so *anthropic*.
    """
    asked = PREFIX.sub("", path)
    if asked == "/v1/messages" or asked.startswith("/v1/messages/"):
        return anthropic_errors.error(trouble)
    if not asked.startswith("/v1/"):
        return {"detail": trouble.message}
    return anthropic_errors.error(trouble) if anthropic and not _is_openais(asked) else errors.error(trouble)


def _is_openais(path: str) -> bool:
    return path.startswith(("/v1/chat/", "/v1/responses"))


def nowhere(path: str, method: str, allowed: str | None) -> str:
    """Give the sentence that refuses *method* at *path*, where *allowed* are answered, or nothing is."""
    if allowed:
        return f"{method} is not answered at {path}; ask it with {allowed.replace(',', ' or ')}"
    return f"nothing is answered at {path}; this server has /v1/responses, /v1/chat/completions and /v1/messages"
