"""Recognize errors that arrive with status 200: error objects, web pages and broken bodies of faulty proxies."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import MappingProxyType

from gymsdk.convert.token_limits import find_limit_refusal
from gymsdk.http.client import HttpResponse
from gymsdk.http.errors import is_retryable_status
from gymsdk.types import Item

MAX_ERROR_BYTES = 65_536
"""The size above which a body is an answer and no error."""

BAD_REQUEST = 400
STATUS_BY_TYPE = MappingProxyType(
    {
        "authentication_error": 401,
        "badrequesterror": BAD_REQUEST,
        "context_length_exceeded": BAD_REQUEST,
        "invalid_request_error": BAD_REQUEST,
        "not_found_error": 404,
        "notfounderror": 404,
        "permission_error": 403,
        "rate_limit_error": 429,
        "rate_limit_exceeded": 429,
    }
)
"""The statuses for the `type` or the `code` of an error, in lower case."""


def reveal_error(answer: HttpResponse) -> tuple[HttpResponse, bool]:
    """Find the error in the body of an *answer* with status 200.

    Returns:
        The answer, with the status that the error names, if it names one; and whether another try may help.
    """
    if not answer.ok:
        return answer, False
    error = _find_error(answer.body)
    if error is None:
        return answer, not (answer.body.lstrip()[:1] == b"{" and answer.body.rstrip()[-1:] == b"}")
    # A rate limit of input tokens reads like a prompt that is too long.
    status = _get_status(error)
    is_limit = find_limit_refusal(status or BAD_REQUEST, answer.body) is not None
    if is_limit and status is None:
        status = BAD_REQUEST
    if status is None:
        return answer, True
    can_retry = not is_limit and is_retryable_status(status)
    return replace(answer, host=f"{answer.host} (with status 200)", status=status), can_retry


def _find_error(data: bytes) -> Item | None:
    """Return the error in the body *data*, `None` if it is an answer or no JSON object.

    A Response has a separate field for an error, beside its output.
    """
    if len(data) > MAX_ERROR_BYTES or not re.search(rb'"error"\s*:\s*["{\[]|"object"\s*:\s*"error"', data):
        return None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or isinstance(body.get("output"), list) or body.get("choices"):
        return None
    if body.get("object") == "error":
        return body
    error = body.get("error")
    return error if isinstance(error, dict) else {"message": error}


def _get_status(error: Item) -> int | None:
    for value in (error.get("code"), error.get("status")):
        text = str(value)
        if text.isdecimal() and int(text) in range(400, 600):
            return int(text)
    kinds = (str(error.get(key)).lower() for key in ("type", "code"))
    return next((STATUS_BY_TYPE[kind] for kind in kinds if kind in STATUS_BY_TYPE), None)
