"""The error responses of servers, as exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gymsdk.http.client import NOT_STARTED_HEADER

CLIENT_CLOSED_REQUEST = 499
"""Status recorded for a request whose client disconnected before the response (nginx's convention)."""


class RequestRejected(Exception):
    """An error response to a request.

    Args:
        status: The HTTP status.
        sentence: The reason, for the `detail` of the body.
        retry_after: Seconds for the `Retry-After` header.
        fields: More keys of the body. `shape` replaces the sentence as `detail`.
    """

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, status: int, sentence: str, *, retry_after: float | None = None, **fields: Any) -> None:
        super().__init__(sentence)
        self.status = status
        self.retry_after = retry_after
        self.fields = fields


class ServerOverloaded(RequestRejected):
    """The server is full and did not start the request, so the client can send it again safely.

    Args:
        sentence: The message: which limit is reached, and what the client can do.
        retry_after: Seconds after which a place is likely to be free.
    """

    headers = MappingProxyType({NOT_STARTED_HEADER: "1"})

    def __init__(self, sentence: str, *, retry_after: float) -> None:
        super().__init__(503, sentence, retry_after=retry_after, stage="admission", kind="too_many", retryable=True)
