"""Errors as the OpenAI API words them."""

from __future__ import annotations

from gymsdk.transcript import Item

from .face import Trouble

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def error(trouble: Trouble) -> Item:
    """Give the body that tells of *trouble*."""
    kind = KINDS.get(trouble.status, "server_error" if trouble.status >= 500 else "invalid_request_error")  # noqa: PLR2004 - where HTTP's own server errors begin
    return {"error": {"message": trouble.message, "type": kind, "param": trouble.param, "code": trouble.code}}
