"""The effect of a request on token ids and log-probabilities, by the table of `gymsdk.convert.request_keys`."""

from __future__ import annotations

from gymsdk.convert import tokens as token_fields
from gymsdk.convert.chat import LOGPROBS_INCLUDE
from gymsdk.convert.request_keys import REQUEST_KEYS, get_key
from gymsdk.errors import Failed
from gymsdk.responses import CONSTRAINED_FIELD, SAMPLING_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.types import Item

PREFIX_FIELD = "required_prefix_token_ids"
"""The field with which NeMo RL's server takes the ids of a conversation. Other engines ignore it."""


def check_fields(body: Item) -> None:
    """Raise `Failed` if a field of a chat request has no meaning with token ids, except fields that gymsdk adds."""
    for name, value in body.items():
        key = get_key(name)
        is_refused = key is not None and (
            (key.effect == "refused" and key.has_effect(value)) or (key.effect == "refused if false" and value is False)
        )
        if key is not None and is_refused:
            raise _build_refusal(name, key.reason)


def check_prefix(body: Item, interface: TokenInterface) -> None:
    """Raise `Failed` if a request has NeMo RL's field for the ids of the conversation, and the engine ignores it."""
    if body.get(PREFIX_FIELD) is not None and interface not in {"nemo-rl", "chat"}:
        raise _build_refusal(PREFIX_FIELD, "the ids of earlier turns come from the conversation")


def is_sampling_key(name: str) -> bool:
    """Whether a field of a request changes the distribution that is sampled."""
    return (key := get_key(name)) is not None and key.effect == "marked"


def get_sampling_settings(body: Item) -> Item:
    """Return the fields of a request because of which the engine samples from another distribution."""
    return {
        name: value
        for name, value in body.items()
        if value is not None and is_sampling_key(name) and value not in REQUEST_KEYS[name].neutral
    }


def get_marks(body: Item) -> Item:
    """Return the fields that mark the last item of an answer with token ids for a trainer."""
    settings = get_sampling_settings(body)
    constrained: Item = {CONSTRAINED_FIELD: True} if is_constrained(body) else {}
    return constrained | ({SAMPLING_FIELD: settings} if settings else {})


def is_constrained(body: Item) -> bool:
    """Whether the engine constrains the decoding of a request in Chat Completions or Responses."""
    text = body.get("text")
    text_format = text.get("format") if isinstance(text, dict) else None
    if text_format and text_format != {"type": "text"}:
        return True
    return forces_tool(body) or any(
        (key := get_key(name)) is not None and key.effect == "constrains" and key.has_effect(value)
        for name, value in body.items()
    )


def forces_tool(body: Item) -> bool:
    """Whether a chat request requires a tool call."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        allowed = choice.get("allowed_tools") or choice
        return choice.get("type") == "function" or allowed.get("mode") == "required"
    return choice == "required"


def add_logprobs(completion: Item, request: Item) -> None:
    """Add the log-probabilities to a *completion* without them, if the *request* asks for those of the text."""
    choice = completion["choices"][0]
    is_wanted = request.get("logprobs") or LOGPROBS_INCLUDE in (request.get("include") or ())
    if not is_wanted or choice.get("logprobs") is not None or TOKEN_FIELDS[1] not in choice["message"]:
        return
    pairs = zip(choice["message"][TOKEN_FIELDS[1]], choice["message"][TOKEN_FIELDS[2]], strict=True)
    choice["logprobs"] = {
        "content": [
            {"token": f"{token_fields.TOKEN_ID_PREFIX}{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def _build_refusal(key: str, reason: str) -> Failed:
    message = f"{key!r} cannot be used with token ids: {reason}; leave it out, or leave out --token-ids"
    return Failed(message, kind="model_bad_request")
