"""Responses for those who speak Responses: what may be sent, and what a server's answer must hold."""

from __future__ import annotations

from typing import Any

from gymsdk import usage as counts
from gymsdk import wire
from gymsdk.errors import Failed
from gymsdk.transcript import Item

from .extras import plain

PATH = "responses"
DETAILS = ("input_tokens_details", "output_tokens_details")


def body(request: Item) -> Item:
    """Give the body to send: *request* written out, and never streamed."""
    return {key: value for key, value in plain(request).items() if key not in {"stream", "stream_options"}}


def response(answer: Any, request: Item) -> Item:
    """Give the *answer* to *request* as a whole Response; raises `Failed` where it is none, or says that it failed."""
    if not isinstance(answer, dict) or not _is_items(answer.get("output")):
        message = f"the model's answer is no Response: {answer}"
        raise Failed(message, kind="model_bad_answer", retryable=True)
    if answer.get("status") == "failed" or answer.get("error"):
        raise Failed(f"the model failed: {answer.get('error')}", kind="model_error", retryable=True)
    whole = wire.response([], model=str(request.get("model", "")), request=request)
    return whole | answer | {"usage": _usage(answer)}


def _usage(answer: Item) -> Item | None:
    """The usage of an *answer*, its counts made numbers, and null where nothing readable was reported."""
    reported = answer.get("usage")
    if not isinstance(reported, dict) or not reported:
        return None
    counted = counts.body(counts.of(answer))
    details = {key: reported[key] | counted[key] for key in DETAILS if isinstance(reported.get(key), dict)}
    return reported | counted | details


def _is_items(output: object) -> bool:
    return isinstance(output, list) and all(isinstance(item, dict) for item in output)
