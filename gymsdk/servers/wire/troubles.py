"""Troubles: why a model's client gets no answer, as a status, a word on asking again, and a body of its API."""

from __future__ import annotations

from types import MappingProxyType

from fastapi import Response

from gymsdk import trail
from gymsdk.convert.faces.face import Face, Malformed, Trouble
from gymsdk.errors import EpisodeError
from gymsdk.http import Refused as RefusedBehind
from gymsdk.servers.app import UNAVAILABLE, Refused, answer
from gymsdk.transcript import Item
from gymsdk.values import written

BAD, UNFIT, LIMITED, UNABLE, GATEWAY, LATE = 400, 422, 429, 501, 502, 504
"""A wrong request, one nobody can answer here, one that comes too soon; what the engine has not, a bad answer from
behind, or none in time."""

STATUSES = MappingProxyType(
    {
        "model_bad_answer": GATEWAY,
        "model_bad_request": BAD,
        "model_bad_tokens": GATEWAY,
        "model_cannot_count": UNABLE,
        "model_misconfigured": GATEWAY,
        "model_not_found": GATEWAY,
        "model_rate_limited": LIMITED,
        "model_refused": BAD,
        "model_timeout": LATE,
        "model_unauthorized": GATEWAY,
    }
)
"""The statuses of failures whose kind says whose fault they are."""

DEEP = "the body is nested too deeply"

FINAL = {"x-should-retry": "false"}
"""What tells the SDKs of OpenAI and Anthropic that a failure of the server is one for good."""


def of_failure(error: EpisodeError) -> Trouble:
    """Give the trouble that a failed call of a model is."""
    otherwise = UNAVAILABLE if error.retryable else UNFIT
    param = error.param if isinstance(error, RefusedBehind) else None
    return Trouble(STATUSES.get(error.kind, otherwise), str(error), code=error.kind, param=param)


def of_request(error: Malformed | Refused | RecursionError) -> Trouble:
    """Give the trouble that a request is which cannot be read."""
    if isinstance(error, Malformed):
        return Trouble(BAD, str(error), param=error.param)
    if isinstance(error, RecursionError):
        return Trouble(BAD, DEEP)
    # What other servers refuse as unfit, the APIs of models call bad.
    return Trouble(BAD if error.status == UNFIT else error.status, str(error))


def of_depth(asked: Item) -> Trouble:
    """Give the trouble that it is where something is nested too deeply: the request *asked*, or what is said to it."""
    try:
        written(asked)
    except RecursionError:
        return Trouble(BAD, DEEP)
    return Trouble(GATEWAY, "the model's answer is nested too deeply to be told", code="model_bad_answer")


def told(face: Face, trouble: Trouble, error: EpisodeError | None = None) -> Response:
    """Give *trouble* as the API of *face* tells it; *error* is the failure it comes from."""
    if error is not None:
        trail.tell(stage=error.stage, kind=error.kind)
    found = answer(face.build_error(trouble), status=trouble.status)
    if error is not None and error.retryable:
        found.headers["retry-after"] = str(max(1, round(error.retry_after or 1)))
    elif trouble.status >= 500:  # noqa: PLR2004 - the SDKs ask again after each of them
        found.headers.update(FINAL)
    return found
