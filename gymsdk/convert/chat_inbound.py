"""Offer Chat Completions: parse its requests into Responses requests, and build completions from Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from gymsdk import responses
from gymsdk.convert import api
from gymsdk.convert import content as parts
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
from gymsdk.convert.chat import ENGINE_ANSWER_FIELDS, LOGPROBS_INCLUDE, STOP_REASON
from gymsdk.convert.request_keys import drop_foreign_keys
from gymsdk.convert.tokens import CARRIED_FIELDS, get_carried_fields
from gymsdk.responses import TOKEN_FIELDS, ReasoningFormat
from gymsdk.types import Item, extract_text, is_object_list

REMOVED_FIELDS = ("functions", "function_call")
"""Fields that OpenAI replaced with `tools` and `tool_choice`."""

TRANSLATED_FIELDS = frozenset(
    {
        *REMOVED_FIELDS,
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "n",
        "reasoning_effort",
        "response_format",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "verbosity",
    }
)
"""The fields that Responses has under another name or in another form, or not at all."""

SHARED_FIELDS = frozenset({"metadata", "parallel_tool_calls"})
"""The fields with the same name and form in both APIs that a chat engine does not get as they are."""

MAX_CHOICES = 128
"""The largest number of choices in one completion, as at OpenAI."""

FINISH_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""The finish reason for each reason why a Response is incomplete."""

CHUNK_FIELDS = ("id", "created", "model", "system_fingerprint", "service_tier")
"""The fields of a completion that each of its chunks has."""

PARSE_ERRORS = (LookupError, TypeError, AttributeError, ValueError)
"""The exceptions that reading a malformed message can raise."""


def parse_request(body: Item) -> Item:
    """Return the Responses request for the *body* of a Chat Completions request.

    Raises:
        InvalidRequest: The body is invalid, or uses removed fields.
    """
    messages = body.get("messages")
    if not is_object_list(messages):
        raise InvalidRequest("'messages' must be a list of messages, each with a role", "messages")
    for key in ("metadata", "response_format", "stream_options"):
        api.get_object(body, key)
    count_choices(body)
    if removed := [key for key in REMOVED_FIELDS if body.get(key)]:
        raise InvalidRequest(f"{removed[0]!r} is not supported; send 'tools' and 'tool_choice'", removed[0])
    known_fields = drop_foreign_keys(body, TRANSLATED_FIELDS | SHARED_FIELDS, where="Chat Completions")
    passed_fields = {
        key: value for key, value in known_fields.items() if value is not None and key not in TRANSLATED_FIELDS
    }
    translated = {key: value for key, value in _translate_fields(body).items() if value is not None}
    return passed_fields | translated | {"input": [item for message in messages for item in parse_message(message)]}


def count_choices(body: Item) -> int:
    """Return the number of choices for which the *body* of a request asks.

    Raises:
        InvalidRequest: It is not an integer in the range that OpenAI accepts.
    """
    number = api.get_integer(body, "n")
    if number is not None and not 1 <= number <= MAX_CHOICES:
        raise InvalidRequest(f"'n' must be an integer from 1 to {MAX_CHOICES}, got {number}", "n")
    return 1 if number is None else number


def join_completions(completions: list[Item]) -> Item:
    """Return one completion with the choices of several *completions* of the same prompt.

    As in OpenAI's usage, the prompt counts once.
    """
    first = completions[0]
    choices = [completion["choices"][0] | {"index": index} for index, completion in enumerate(completions)]
    return first | {"choices": choices, "usage": _join_usage([completion["usage"] for completion in completions])}


def _join_usage(usages: list[Item | None]) -> Item | None:
    known = [usage for usage in usages if usage]
    # A sum without one of the answers would be too small.
    if len(known) < len(usages):
        return None
    details = [usage.get("completion_tokens_details") or {} for usage in known]
    names = dict.fromkeys(chain.from_iterable(details))
    summed = {name: sum(counts.get(name) or 0 for counts in details) for name in names}
    generated = sum(usage["completion_tokens"] for usage in known)
    return known[0] | {
        "completion_tokens": generated,
        "total_tokens": known[0]["prompt_tokens"] + generated,
        "completion_tokens_details": summed or known[0].get("completion_tokens_details"),
    }


def parse_tools(tools: object) -> list[Item]:
    """Return the *tools* of a chat request in the format of Responses.

    Raises:
        InvalidRequest: It is not a list of functions with names.
    """
    if not is_object_list(tools):
        raise InvalidRequest("'tools' must be a list of tools", "tools")
    return [_parse_tool(tool, number) for number, tool in enumerate(tools)]


def parse_message(message: Item) -> list[Item]:
    """Return the items for a chat *message*: for an assistant message its reasoning, text and calls.

    A `<think>` tag in the text of an assistant stays text: the chat template decides whether the model sees earlier
    reasoning again.

    Raises:
        InvalidRequest: The message is malformed, or uses `function_call`.
    """
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("each of 'messages' must have a role", "messages")
    if message["role"] == "function" or message.get("function_call"):
        raise InvalidRequest(
            "'function_call' is not supported; send 'tool_calls', and their outputs with role 'tool'", "messages"
        )
    try:
        return list(_parse_items(message))
    except PARSE_ERRORS as error:
        raise InvalidRequest(f"a message of role {message['role']!r} is malformed: {error!r}", "messages") from error


def build_answer(response: Item, body: Item) -> Item:
    """Return the completion for *response*, with reasoning and token ids as the *body* of the request asks."""
    thoughts: ReasoningFormat = "tags" if body.get("separate_reasoning") is False else "field"
    completion = build_completion(response, thoughts="drop" if body.get("include_reasoning") is False else thoughts)
    choice = completion["choices"][0]
    message = choice["message"]
    if body.get("return_token_ids") and TOKEN_FIELDS[1] in message:
        completion["prompt_token_ids"] = message.get(TOKEN_FIELDS[0])
        choice["token_ids"] = message[TOKEN_FIELDS[1]]
    return completion


def build_completion(response: Item, *, thoughts: ReasoningFormat = "field") -> Item:
    """Return the chat completion for *response*.

    Args:
        response: The Response.
        thoughts: Whether to put reasoning in a `field` of the message, in `<think>` `tags`, or to `drop` it.
    """
    output = response["output"]
    choice = {
        "index": 0,
        "message": _build_message(output, thoughts),
        "logprobs": _join_logprobs(output),
        "finish_reason": _get_finish_reason(response),
    }
    if response.get(STOP_REASON) is not None:
        choice[STOP_REASON] = response[STOP_REASON]
    completion = {
        "id": responses.generate_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(response.get("created_at") or time.time()),
        "model": response.get("model") or "",
        "choices": [choice],
        "usage": format_usage(response.get("usage")),
        "system_fingerprint": None,
    }
    return completion | {key: response[key] for key in ENGINE_ANSWER_FIELDS if response.get(key) is not None}


def format_usage(usage: Item | None) -> Item | None:
    """Return the *usage* of a Response in the format of a completion, `None` if there is none."""
    if not usage:
        return None
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }


def stream_chunks(answer: Item, body: Item) -> Iterator[bytes]:
    """Yield the frames of the chunks for *answer*, with usage if the *body* of the request asks for it."""
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    head: Item = {"object": "chat.completion.chunk", **{key: answer[key] for key in CHUNK_FIELDS if key in answer}}
    if with_usage:
        head["usage"] = None
    # The ids and log-probabilities of the prompt are sent once, with the first chunk.
    prompt = {key: answer[key] for key in ("prompt_token_ids", "prompt_logprobs") if key in answer}
    for choice in answer["choices"]:
        for delta in _iter_deltas(choice):
            yield build_frame(dump_line(head | prompt | {"choices": [delta | {"index": choice["index"]}]}))
            prompt = {}
    if with_usage:
        yield build_frame(dump_line(head | {"choices": [], "usage": answer["usage"]}))
    yield DONE_FRAME


def _translate_fields(body: Item) -> Item:
    """Return the fields that Responses has under another name or in another form."""
    limit, effort = api.get_integer(body, "max_completion_tokens"), body.get("reasoning_effort")
    return {
        "max_output_tokens": api.get_integer(body, "max_tokens") if limit is None else limit,
        "reasoning": {"effort": effort} if effort else None,
        "text": _parse_text_format(body),
        "tools": parse_tools(body["tools"]) if body.get("tools") else None,
        "tool_choice": _parse_tool_choice(body.get("tool_choice")),
        "include": [LOGPROBS_INCLUDE] if body.get("logprobs") else None,
    }


def _parse_text_format(body: Item) -> Item | None:
    text_format = _flatten(body.get("response_format"))
    if text_format and not isinstance(text_format.get("type"), str):
        raise InvalidRequest("'response_format' must have a type", "response_format")
    text = {"format": text_format or None, "verbosity": body.get("verbosity")}
    return {key: value for key, value in text.items() if value is not None} or None


def _parse_tool(tool: Item, number: int) -> Item:
    flat: Item = _flatten(tool)
    if not isinstance(flat.get("name"), str):
        raise InvalidRequest(f"tools[{number}] must be a function with a name", "tools")
    return flat


def _parse_tool_choice(choice: Any) -> Any:
    flat = _flatten(choice) if isinstance(choice, dict) else choice
    if isinstance(flat, dict) and flat.get("type") == "allowed_tools":
        allowed = flat.get("tools")
        if not is_object_list(allowed):
            raise InvalidRequest("'tool_choice' must list the tools that are allowed", "tool_choice")
        return flat | {"tools": [_flatten(tool) for tool in allowed]}
    return flat


def _flatten(nested: Any) -> Any:
    """Return `{"type": "x", "x": {…}}` without its inner level, and anything else unchanged."""
    kind = nested.get("type") if isinstance(nested, dict) else None
    inner = nested.get(kind) if isinstance(kind, str) else None
    return {"type": kind, **inner} if isinstance(inner, dict) else nested


def _parse_items(message: Item) -> Iterator[Item]:
    role = message["role"]
    if role == "tool":
        output = parts.from_chat_content(message.get("content"))
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
    elif role == "assistant":
        items = list(_parse_assistant_message(message))
        if items:
            items[-1] |= {key: message[key] for key in CARRIED_FIELDS if message.get(key)}
        yield from items
    else:
        yield {"role": role, "content": parts.from_chat_content(message.get("content"))}


def _parse_assistant_message(message: Item) -> Iterator[Item]:
    reasoning_fields = [message[key] for key in ("reasoning_content", "reasoning") if message.get(key) is not None]
    reasoning = next(filter(None, reasoning_fields), "")
    calls = message.get("tool_calls") or []
    if reasoning_fields:
        if not isinstance(reasoning, str):
            raise TypeError("its reasoning is not a string")
        yield responses.build_reasoning(reasoning)
    if content := _parse_assistant_content(message):
        yield responses.build_message("") | {"content": content}
    elif not (reasoning or calls):
        yield responses.build_message("")
    for call in calls:
        function = call["function"]
        yield responses.build_function_call(function["name"], function.get("arguments") or "{}", call.get("id"))


def _parse_assistant_content(message: Item) -> list[Item]:
    """Return the content parts of an assistant *message*, including its refusal."""
    content = message.get("content") or []
    content_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    refusal = message.get("refusal")
    with_refusal = [*content_parts, {"type": "refusal", "refusal": refusal}] if refusal else content_parts
    converted = parts.from_chat_content(with_refusal, written=True)
    assert isinstance(converted, list), "a list is converted to a list"
    return [part | {"annotations": []} if part["type"] == "output_text" else part for part in converted]


def _build_message(output: list[Item], thoughts: ReasoningFormat) -> Item:
    text = "".join(extract_text(item.get("content")) for item in output if _get_type(item) == "message")
    reasoning = parts.join_reasoning(output) if thoughts != "drop" else None
    refusal = "".join(part.get("refusal") or "" for part in _get_message_parts(output))
    calls = [_build_tool_call(item) for item in output if _get_type(item) == "function_call"]
    if thoughts == "tags":
        text = parts.prepend_think_block(reasoning, text)
    message: Item = {
        "role": "assistant",
        "content": text or (None if calls or refusal else ""),
        "refusal": refusal or None,
    }
    if reasoning is not None and thoughts == "field":
        # Clients differ in the name of the field.
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message | get_carried_fields(output)


def _get_type(item: Item) -> str:
    kind: str = item.get("type") or "message"
    return kind


def _get_message_parts(output: list[Item]) -> list[Item]:
    contents = (item.get("content") for item in output if _get_type(item) == "message")
    return [part for content in contents if isinstance(content, list) for part in content]


def _build_tool_call(item: Item) -> Item:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _join_logprobs(output: list[Item]) -> Item | None:
    logprobs: list[list[Any]] = [part["logprobs"] for part in _get_message_parts(output) if part.get("logprobs")]
    if not logprobs:
        return None
    return {"content": logprobs[0] if len(logprobs) == 1 else list(chain.from_iterable(logprobs)), "refusal": None}


def _get_finish_reason(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in FINISH_REASONS:
        return FINISH_REASONS[reason]
    if response.get("status") == "incomplete":
        return "length"
    return "tool_calls" if any(_get_type(item) == "function_call" for item in response["output"]) else "stop"


def _iter_deltas(choice: Item) -> Iterator[Item]:
    message, logprobs = choice["message"], choice.get("logprobs")
    content = None if message["content"] is None else ""
    yield _build_choice({"role": "assistant", "content": content, "refusal": None})
    if reasoning := {key: message[key] for key in ("reasoning_content", "reasoning") if key in message}:
        yield _build_choice(reasoning)
    if message["content"] or logprobs:
        yield _build_choice({"content": message["content"]}, logprobs=logprobs)
    if message.get("refusal"):
        yield _build_choice({"refusal": message["refusal"]})
    for index, call in enumerate(message.get("tool_calls") or []):
        yield from _iter_call_choices(index, call)
    # Clients concatenate the lists of all deltas, so the token fields must come only once.
    tokens = {key: message[key] for key in CARRIED_FIELDS if key in message}
    end = {key: choice[key] for key in ("token_ids", STOP_REASON) if key in choice}
    yield _build_choice(tokens, finish_reason=choice["finish_reason"]) | end


def _iter_call_choices(index: int, call: Item) -> Iterator[Item]:
    function = call["function"]
    start = {"index": index, "id": call["id"], "type": "function", "function": function | {"arguments": ""}}
    yield _build_choice({"tool_calls": [start]})
    if function["arguments"]:
        yield _build_choice({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})


def _build_choice(delta: Item, *, logprobs: Any = None, finish_reason: str | None = None) -> Item:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


CHAT_API = InboundApi(
    path="chat/completions",
    parse_request=parse_request,
    build_answer=build_answer,
    stream_events=stream_chunks,
    build_error=build_error,
    build_error_frames=build_error_frames,
    heartbeat=HEARTBEAT_FRAME,
    count_answers=count_choices,
    join_answers=join_completions,
)
