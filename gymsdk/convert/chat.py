"""Convert Responses requests to Chat Completions bodies, and chat completions to Responses.

The module also defines how the `metadata` of a request carries further fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, takewhile
from typing import Any

from gymsdk import responses
from gymsdk.convert import content as parts
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.arguments import repair_messages
from gymsdk.convert.content import build_untranslatable_error
from gymsdk.convert.request_keys import CHAT_KEYS, TRANSLATED_KEYS, check_configuration_key, select_keys
from gymsdk.errors import Failed
from gymsdk.responses import normalize_usage, read_text
from gymsdk.types import Content, Item, extract_text, is_content, is_reply

CHAT_PATH = "chat/completions"

EXTRA_BODY_KEY = "extra_body"
CHAT_TEMPLATE_KEY = "chat_template_kwargs"

LOGPROBS_INCLUDE = "message.output_text.logprobs"
"""The value of `include` with which a request asks for log-probabilities."""

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
ABORTED_REASONS = frozenset({"abort", "error"})
"""The finish reasons of an answer that the engine aborted, for example to update weights. Its text is not a reply."""

STOP_REASON = "stop_reason"
"""The field of a choice with the stop sequence, or the id of the stop token, that ended an answer of an engine."""

ENGINE_ANSWER_FIELDS = ("prompt_logprobs", "service_tier", "system_fingerprint")
"""The fields of a completion that its Response keeps. Except for `service_tier`, Responses does not have them."""

MAX_EXCERPT_CHARS = 500
"""The length of the excerpt of an invalid answer in an error message."""


def build_body(
    request: Item,
    *,
    thoughts: responses.ReasoningFormat = "field",
    limit: str = "max_tokens",
    passes_unknown: bool = False,
) -> Item:
    """Return the Chat Completions body for a Responses *request*.

    Args:
        request: The Responses request.
        thoughts: How to send earlier reasoning: in a `field` of the message, in `<think>` `tags`, or `drop` it.
        limit: The name under which to send `max_output_tokens`.
        passes_unknown: Whether to send keys that gymsdk does not know.

    Raises:
        Failed: Chat Completions cannot express the request.
    """
    fields = {key: value for key, value in request.items() if key not in TRANSLATED_KEYS}
    passed_fields = select_keys(fields, CHAT_KEYS, passes_unknown=passes_unknown)
    if passed_fields.get("top_logprobs") or _wants_logprobs(request):
        # Chat servers reject top_logprobs without logprobs.
        passed_fields = {"logprobs": True} | passed_fields
    translated = (
        {limit: request.get("max_output_tokens"), "reasoning_effort": (request.get("reasoning") or {}).get("effort")}
        | _build_text_fields(request)
        | _build_tool_fields(request)
    )
    messages = repair_messages(build_messages(request, thoughts=thoughts))
    return (
        parse_metadata_extras(request)
        | passed_fields
        | {key: value for key, value in translated.items() if value is not None}
        | {"messages": token_fields.keep_last_ids(messages)}
    )


def build_messages(request: Item, *, thoughts: responses.ReasoningFormat = "field") -> list[Item]:
    """Return the chat messages of *request*.

    Each turn of the policy becomes one assistant message. The instructions and all leading system messages become one
    system message. The arguments of tool calls stay as the policy wrote them; servers need `repair_messages`.

    Raises:
        Failed: Chat Completions cannot express an item.
    """
    input_items: Content = request.get("input") or []
    items = [{"role": "user", "content": input_items}] if isinstance(input_items, str) else input_items
    messages: list[Item] = []
    for by_policy, group in groupby(items, _is_by_policy):
        run = list(group)
        messages += [_build_assistant_message(run, thoughts)] if by_policy else [_build_message(item) for item in run]
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    system_texts = [request.get("instructions"), *(extract_text(message["content"]) for message in system)]
    prompt = "\n\n".join(filter(None, system_texts))
    return ([{"role": "system", "content": prompt}] if prompt else []) + messages[len(system) :]


def parse_completion(completion: Any, request: Item, *, strict: bool = False) -> Item:
    """Convert a chat *completion* to a Response.

    Args:
        completion: The answer of the server.
        request: The Responses request.
        strict: Whether to reject invalid token fields; otherwise they are dropped.

    Raises:
        Failed: The answer is no chat completion, or the server aborted it.
    """
    try:
        return _parse_completion(completion, request, strict=strict)
    except (LookupError, TypeError, AttributeError) as error:
        message = f"the model's answer is not a chat completion: {str(completion)[:MAX_EXCERPT_CHARS]}"
        raise Failed(message, kind="model_bad_answer", retryable=True) from error


def parse_completion_usage(reported: object) -> Item | None:
    """Convert the usage of a completion to the usage of a Response; `None` if it is missing or not an object."""
    if not isinstance(reported, dict) or not reported:
        return None
    fields = {
        "input_tokens": reported.get("prompt_tokens"),
        "input_tokens_details": reported.get("prompt_tokens_details"),
        "output_tokens": reported.get("completion_tokens"),
        "output_tokens_details": reported.get("completion_tokens_details"),
    }
    return normalize_usage(fields)


def read_token_fields(completion: Item, *, strict: bool) -> Item:
    """Return the token fields of a *completion*; if they are invalid, none.

    Raises:
        Failed: The token fields are invalid and *strict* is true.
    """
    try:
        return token_fields.parse_token_fields(completion)
    except Failed:
        if strict:
            raise
        return {}


def parse_metadata_extras(request: Item) -> Item:
    """Return the fields that the `metadata` of *request* adds to the body, as JSON text or as an object.

    Raises:
        Failed: The value is not a JSON object, or has a key that only the configuration of a model may set.
    """
    if not (metadata := request.get("metadata")):
        return {}
    template, extra_body = _parse_extra(metadata, CHAT_TEMPLATE_KEY), _parse_extra(metadata, EXTRA_BODY_KEY)
    for key in extra_body:
        check_configuration_key(key)
    return extra_body | ({CHAT_TEMPLATE_KEY: template} if template else {})


def expand_metadata_extras(request: Item) -> Item:
    """Return *request* with the fields that its `metadata` adds, and without null values."""
    if not request.get("metadata"):
        return {key: value for key, value in request.items() if value is not None and key != "metadata"}
    extra_keys = {EXTRA_BODY_KEY, CHAT_TEMPLATE_KEY}
    metadata = {key: value for key, value in request["metadata"].items() if key not in extra_keys}
    kept = {key: value for key, value in request.items() if value is not None and key != "metadata"}
    return parse_metadata_extras(request) | kept | ({"metadata": metadata} if metadata else {})


def _parse_extra(metadata: Item, key: str) -> Item:
    value = metadata.get(key) or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Failed(f"metadata.{key} is not JSON: {error}", kind="model_bad_request") from error
    if isinstance(value, dict):
        return value
    raise Failed(f"metadata.{key} must be a JSON object", kind="model_bad_request")


def _parse_completion(completion: Item, request: Item, *, strict: bool) -> Item:
    choice = completion["choices"][0]
    finish_reason = choice.get("finish_reason")
    if finish_reason in ABORTED_REASONS or choice.get("error"):
        reason = choice.get("error") or f"finish_reason {finish_reason!r}"
        message = f"the server gave up the answer ({str(reason)[:MAX_EXCERPT_CHARS]})"
        raise Failed(message, kind="model_error", retryable=True)
    content = choice["message"].get("content")
    if not is_content(content):
        # Not retryable: the server would convert the same generation in the same way.
        excerpt = repr(content)[:MAX_EXCERPT_CHARS]
        message = f"the content of the model's answer is {excerpt}, which is neither text nor a list of parts"
        raise Failed(message, kind="model_bad_answer")
    output = list(_parse_message(choice["message"]))
    output[-1] |= read_token_fields(completion, strict=strict)
    if _wants_logprobs(request):
        _add_logprobs(output, choice)
    incomplete_reason = INCOMPLETE_REASONS.get(finish_reason)
    response = responses.build_response(
        output,
        model=completion.get("model") or request.get("model") or "",
        usage=parse_completion_usage(completion.get("usage")),
        status="incomplete" if incomplete_reason else "completed",
        reason=incomplete_reason,
        request=request,
    )
    return response | _get_engine_fields(completion, choice)


def _get_engine_fields(completion: Item, choice: Item) -> Item:
    """Return the fields of a completion that Responses does not have, for the client that made the request."""
    fields = {key: completion[key] for key in ENGINE_ANSWER_FIELDS if completion.get(key) is not None}
    stop = choice.get(STOP_REASON)
    if stop is not None:
        fields[STOP_REASON] = stop
    return fields | {"stop_sequence": stop} if isinstance(stop, str) else fields


def _wants_logprobs(request: Item) -> bool:
    return bool(request.get("logprobs")) or LOGPROBS_INCLUDE in (request.get("include") or ())


def _add_logprobs(output: list[Item], choice: Item) -> None:
    """Add the log-probabilities of *choice* to the first text part of *output*."""
    logprobs = (choice.get("logprobs") or {}).get("content")
    texts = [part for item in output if is_reply(item) for part in item["content"] if part["type"] == "output_text"]
    if logprobs and texts:
        texts[0]["logprobs"] = logprobs


def _is_by_policy(item: Item) -> bool:
    # A tuple, because the type in a client's item may be unhashable.
    return item.get("type") in ("reasoning", "function_call") or is_reply(item)


def _build_assistant_message(items: list[Item], thoughts: responses.ReasoningFormat) -> Item:
    """Return the assistant message for the *items* of one turn."""
    text = "".join(extract_text(parts.to_chat_content(item.get("content"))) for item in items if is_reply(item))
    reasoning = parts.join_reasoning(items) if thoughts != "drop" else None
    calls = [_build_tool_call(item) for item in items if item.get("type") == "function_call"]
    if thoughts == "tags":
        text = parts.prepend_think_block(reasoning, text)
    message: Item = {"role": "assistant", "content": text or (None if calls else "")}
    if reasoning is not None and thoughts == "field":
        # Servers differ in the name of the field.
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message | token_fields.get_carried_fields(items, token_fields.ENGINE_FIELDS)


def _build_tool_call(item: Item) -> Item:
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _build_message(item: Item) -> Item:
    if item.get("type") == "function_call_output":
        content = parts.to_chat_content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if item.get("type", "message") != "message" or "role" not in item:
        raise build_untranslatable_error(f"an input item of type {item.get('type')!r}")
    # Few chat templates support the role `developer`.
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": parts.to_chat_content(item.get("content"))}


def _build_text_fields(request: Item) -> Item:
    text = request.get("text") or {}
    text_format = text.get("format") or {"type": "text"}
    if text_format["type"] == "json_schema":
        schema = {key: value for key, value in text_format.items() if key != "type"}
        text_format = {"type": "json_schema", "json_schema": schema}
    response_format = text_format if text_format["type"] != "text" else None
    return {"response_format": response_format, "verbosity": text.get("verbosity")}


def _build_tool_fields(request: Item) -> Item:
    choice = request.get("tool_choice")
    if not request.get("tools"):
        parts.check_tool_choice(choice)
        return {}
    choice = _build_tool_choice(choice) if isinstance(choice, dict) else choice
    tools = [_build_tool(tool) for tool in request["tools"]]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": request.get("parallel_tool_calls")}


def _build_tool_choice(choice: Item) -> Item:
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        allowed = [_build_tool_choice(tool) for tool in choice.get("tools") or []]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    return choice


def _build_tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        raise build_untranslatable_error(f"a tool of type {tool.get('type')!r}")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _parse_message(message: Item) -> Iterator[Item]:
    """Yield the items of an assistant *message*: reasoning, text, refusal, calls; at least one item."""
    in_parts, content_text = parts.split_content(message.get("content"))
    reasoning_fields = [
        message[key] for key in ("reasoning_content", "reasoning") if isinstance(message.get(key), (str, list))
    ]
    in_fields = [*map(read_text, reasoning_fields)]
    in_text, text = parts.split_think_blocks(content_text, separated=any(map(str.strip, in_fields)))
    # Some servers return the same reasoning in both fields, and some also leave it in the text.
    candidates = (*in_text, *in_parts, *in_fields)
    reasoning = list({stripped: candidate for candidate in candidates if (stripped := candidate.strip())}.values())
    if reasoning:
        yield responses.build_reasoning(*reasoning)
    elif reasoning_fields:
        # Some engines refuse a conversation in which the empty reasoning that they returned is missing.
        yield responses.build_reasoning("")
    calls = message.get("tool_calls") or []
    refusal = message.get("refusal")
    if text.strip() or not (calls or reasoning or refusal):
        yield responses.build_message(text)
    if refusal:
        yield responses.build_message("") | {"content": [{"type": "refusal", "refusal": refusal}]}
    for call in calls:
        function = call["function"]
        yield responses.build_function_call(function["name"], function.get("arguments") or "{}", call.get("id"))
