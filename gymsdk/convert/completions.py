"""Forward legacy completions: check the requests of clients, and stream whole answers.

Completions have a text or token ids as their prompt instead of a conversation, so nothing is translated. The engine
gets the request, and the client its answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from gymsdk import responses
from gymsdk.convert import api
from gymsdk.convert.api import (
    DONE_FRAME,
    HEARTBEAT_FRAME,
    InboundApi,
    InvalidRequest,
    build_error,
    build_error_frames,
    build_frame,
    dump_line,
)
from gymsdk.convert.chat import ABORTED_REASONS, MAX_EXCERPT_CHARS
from gymsdk.convert.request_keys import TRANSLATED_KEYS, check_configuration_key, drop_foreign_keys, get_key
from gymsdk.errors import Failed
from gymsdk.types import Item, is_object_list

COMPLETIONS_PATH = "completions"

STREAM_FIELDS = ("stream", "stream_options")

PROMPT_FORMS = "a text, a list of texts, a list of token ids, or a list of such lists"

IDENTITY_KEYS = frozenset({"user"})
"""The keys without an effect on the answer that Completions defines."""


def parse_request(body: Item) -> Item:
    """Validate the *body* of a client and return it without streaming options.

    Raises:
        InvalidRequest: The prompt, the number of choices or the options of the stream are invalid.
    """
    if body.get("prompt_embeds") is None and not _is_prompt(body.get("prompt")):
        raise InvalidRequest(f"'prompt' must be {PROMPT_FORMS}", "prompt")
    for key in ("n", "best_of"):
        number = api.get_integer(body, key)
        if number is not None and number < 1:
            raise InvalidRequest(f"{key!r} must be at least 1, got {number}", key)
    api.get_object(body, "stream_options")
    known_fields = drop_foreign_keys(body, frozenset(), where="Completions")
    return {key: value for key, value in known_fields.items() if key not in STREAM_FIELDS}


def build_body(request: Item) -> Item:
    """Return the body to send for *request*, the body of a client with the keys that the model pins.

    Raises:
        Failed: The request has a key that only the configuration of a model may set.
    """
    # Only a pin has the limit under this name.
    limit = {"max_tokens": request["max_output_tokens"]} if request.get("max_output_tokens") is not None else {}
    passed_fields = {key: value for key, value in request.items() if key not in TRANSLATED_KEYS and value is not None}
    for key in passed_fields:
        check_configuration_key(key)
    return {key: value for key, value in passed_fields.items() if not _is_ignored(key)} | limit


def parse_answer(answer: Any, _: Item, *, strict: bool = False) -> Item:  # noqa: ARG001 - the signature of all APIs
    """Return the *answer* of a server as it is.

    Raises:
        Failed: The answer is no completion, or the server aborted it.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (choices and is_object_list(choices) and all(isinstance(choice.get("text"), str) for choice in choices)):
        message = f"the model's answer is not a completion: {str(answer)[:MAX_EXCERPT_CHARS]}"
        raise Failed(message, kind="model_bad_answer", retryable=True)
    reasons = [str(choice.get("finish_reason")) for choice in choices]
    if aborted := next((reason for reason in reasons if reason in ABORTED_REASONS), None):
        raise Failed(f"the server gave up the answer (finish_reason {aborted!r})", kind="model_error", retryable=True)
    completion: Item = answer
    return completion


def build_answer(completion: Item, body: Item) -> Item:
    """Return *completion* with all fields that OpenAI's types require; *body* is that of the request."""
    defaults = {
        "id": responses.generate_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": str(body.get("model") or ""),
    }
    return defaults | {key: value for key, value in completion.items() if value is not None or key not in defaults}


def stream_chunks(answer: Item, body: Item) -> Iterator[bytes]:
    """Yield the frames of the chunks for *answer*, with usage if the *body* of the request asks for it."""
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    head = {key: value for key, value in answer.items() if key not in {"choices", "usage"}}
    if with_usage:
        head["usage"] = None
    for number, choice in enumerate(answer["choices"]):
        complete = {"index": number, "logprobs": None, "finish_reason": None} | choice
        yield build_frame(dump_line(head | {"choices": [complete]}))
    if with_usage:
        yield build_frame(dump_line(head | {"choices": [], "usage": answer.get("usage")}))
    yield DONE_FRAME


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list) and prompt:
        return _is_ids(prompt) or {*map(type, prompt)} == {str} or all(map(_is_ids, prompt))
    return isinstance(prompt, str)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and {*map(type, value)} == {int}


def _is_ignored(name: str) -> bool:
    """Whether the key *name* is about identity, caching or telemetry, and Completions does not define it."""
    key = get_key(name)
    return key is not None and key.use == "ignored" and name not in IDENTITY_KEYS


COMPLETIONS_API = InboundApi(
    path=COMPLETIONS_PATH,
    parse_request=parse_request,
    build_answer=build_answer,
    stream_events=stream_chunks,
    build_error=build_error,
    build_error_frames=build_error_frames,
    heartbeat=HEARTBEAT_FRAME,
)
