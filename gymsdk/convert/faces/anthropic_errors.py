"""Errors as the Anthropic API words them."""

from __future__ import annotations

from types import MappingProxyType

from gymsdk.transcript import Item

from .face import Trouble

KINDS = MappingProxyType(
    {
        401: "authentication_error",
        402: "billing_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""The types of errors by status; any other is an `api_error` where it is the server's, else a wrong request."""


def error(trouble: Trouble) -> Item:
    """Give the body that tells of *trouble*; the SDK reads its code among the details."""
    otherwise = "api_error" if trouble.status >= 500 else "invalid_request_error"  # noqa: PLR2004 - where HTTP's own server errors begin
    kind = KINDS.get(trouble.status, otherwise)
    details = {"details": {"error_code": trouble.code}} if trouble.code else {}
    return {"type": "error", "error": {"type": kind, "message": trouble.message} | details}
