"""Chat Completions as a server speaks it: a chat body becomes a Responses request, a Response a completion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from gymsdk import responses
from gymsdk.convert import api
from gymsdk.convert import content as parts
from gymsdk.convert.api import ApiError, InboundApi, InvalidRequest, build_error
from gymsdk.convert.chat import LOGPROBS_INCLUDE, drop_unknown_fields
from gymsdk.convert.sse import DONE_FRAME, HEARTBEAT_FRAME, build_frame, dump_line
from gymsdk.convert.tokens import CARRIED_FIELDS, get_carried_fields
from gymsdk.responses import TOKEN_FIELDS, ReasoningFormat
from gymsdk.types import Item, extract_text, is_object_list

FINISH_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def build_answer(response: Item, asked: Item) -> Item:
    """Give the completion for the chat body *asked*, its thoughts and its token ids where that wants them."""
    tags: ReasoningFormat = "tags" if asked.get("separate_reasoning") is False else "field"
    told = build_completion(response, thoughts="drop" if asked.get("include_reasoning") is False else tags)
    message = told["choices"][0]["message"]
    if asked.get("return_token_ids") and TOKEN_FIELDS[1] in message:
        told["prompt_token_ids"] = message.get(TOKEN_FIELDS[0])
        told["choices"][0]["token_ids"] = message[TOKEN_FIELDS[1]]
    return told


def build_completion(response: Item, *, thoughts: ReasoningFormat = "field") -> Item:
    """Give the chat completion that says what *response* says."""
    output = response["output"]
    choice = {
        "index": 0,
        "message": _message(output, thoughts),
        "logprobs": _logprobs(output),
        "finish_reason": _finish(response),
    }
    return {
        "id": responses.generate_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(response.get("created_at") or time.time()),
        "model": response.get("model") or "",
        "choices": [choice],
        "usage": format_usage(response.get("usage")),
        "system_fingerprint": None,
    }


def format_usage(reported: Item | None) -> Item | None:
    """Give the usage of a Response in the words of a completion, null where nothing was *reported*."""
    if not reported:
        return None
    return {
        "prompt_tokens": reported["input_tokens"],
        "completion_tokens": reported["output_tokens"],
        "total_tokens": reported["total_tokens"],
        "prompt_tokens_details": reported.get("input_tokens_details"),
        "completion_tokens_details": reported.get("output_tokens_details"),
    }


def _message(output: list[Item], thoughts: ReasoningFormat) -> Item:
    text = "".join(extract_text(item.get("content")) for item in output if _kind(item) == "message")
    thought = parts.join_reasoning(output) if thoughts != "drop" else ""
    refusal = "".join(part.get("refusal") or "" for part in _parts(output))
    calls = [_build_tool_call(item) for item in output if _kind(item) == "function_call"]
    if thoughts == "tags":
        text = parts.prepend_think_block(thought, text)
    message: Item = {
        "role": "assistant",
        "content": text or (None if calls or refusal else ""),
        "refusal": refusal or None,
    }
    if thought and thoughts == "field":
        # Clients are divided over the name of the field.
        message |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        message["tool_calls"] = calls
    return message | get_carried_fields(output)


def _kind(item: Item) -> str:
    kind: str = item.get("type") or "message"
    return kind


def _parts(output: list[Item]) -> list[Item]:
    contents = (item.get("content") for item in output if _kind(item) == "message")
    return [part for content in contents if isinstance(content, list) for part in content]


def _build_tool_call(item: Item) -> Item:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _logprobs(output: list[Item]) -> Item | None:
    given: list[list[Any]] = [part["logprobs"] for part in _parts(output) if part.get("logprobs")]
    if not given:
        return None
    return {"content": given[0] if len(given) == 1 else list(chain.from_iterable(given)), "refusal": None}


def _finish(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in FINISH_REASONS:
        return FINISH_REASONS[reason]
    if response.get("status") == "incomplete":
        return "length"
    return "tool_calls" if any(_kind(item) == "function_call" for item in response["output"]) else "stop"


CHUNK_FIELDS = ("id", "created", "model", "system_fingerprint")


def stream_chunks(answer: Item, asked: Item) -> Iterator[bytes]:
    """Give the frames that tell *answer*, its usage where the body *asked* wants it."""
    counted = bool((asked.get("stream_options") or {}).get("include_usage"))
    head: Item = {"object": "chat.completion.chunk", **{key: answer[key] for key in CHUNK_FIELDS if key in answer}}
    if counted:
        head["usage"] = None
    prompt = {"prompt_token_ids": answer["prompt_token_ids"]} if "prompt_token_ids" in answer else {}
    for choice in _iter_choices(answer["choices"][0]):
        yield build_frame(dump_line(head | prompt | {"choices": [choice]}))
        prompt = {}
    if counted:
        yield build_frame(dump_line(head | {"choices": [], "usage": answer["usage"]}))
    yield DONE_FRAME


def build_error_frames(trouble: ApiError) -> bytes:
    """Give the frames of a stream that ends in *trouble*."""
    return build_frame(dump_line(build_error(trouble))) + DONE_FRAME


def _iter_choices(choice: Item) -> Iterator[Item]:
    message, logprobs = choice["message"], choice.get("logprobs")
    yield _build_choice({"role": "assistant", "content": None if message["content"] is None else "", "refusal": None})
    if thoughts := {key: message[key] for key in ("reasoning_content", "reasoning") if message.get(key)}:
        yield _build_choice(thoughts)
    if message["content"] or logprobs:
        yield _build_choice({"content": message["content"]}, logprobs=logprobs)
    if message.get("refusal"):
        yield _build_choice({"refusal": message["refusal"]})
    for index, call in enumerate(message.get("tool_calls") or []):
        yield from _iter_call_choices(index, call)
    # A client adds deltas up, lists too: the tokens come once, with the end.
    tokens = {key: message[key] for key in CARRIED_FIELDS if key in message}
    ids = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
    yield _build_choice(tokens, finish=choice["finish_reason"]) | ids


def _iter_call_choices(index: int, call: Item) -> Iterator[Item]:
    function = call["function"]
    opened = {"index": index, "id": call["id"], "type": "function", "function": function | {"arguments": ""}}
    yield _build_choice({"tool_calls": [opened]})
    if function["arguments"]:
        yield _build_choice({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})


def _build_choice(delta: Item, *, logprobs: Any = None, finish: str | None = None) -> Item:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


PARSE_ERRORS = (LookupError, TypeError, AttributeError, ValueError)
"""What comes of reading a message that is none."""


def parse_message(message: Item) -> list[Item]:
    """Give the items that a chat *message* amounts to; raises `Malformed`.

    An assistant's are its thoughts, its text and its calls. A `<think>` in its text stays text: whether earlier
    thoughts are shown again is the chat template's business, and to take them out would change what it is given.
    """
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("each of 'messages' must have a role", "messages")
    if message["role"] == "function" or message.get("function_call"):
        raise InvalidRequest(
            "'function_call' is no longer spoken; send 'tool_calls', and answers as role 'tool'", "messages"
        )
    try:
        return list(_items(message))
    except PARSE_ERRORS as error:
        raise InvalidRequest(f"a message of role {message['role']!r} is malformed: {error!r}", "messages") from error


def _items(message: Item) -> Iterator[Item]:
    role = message["role"]
    if role == "tool":
        output = parts.from_chat_content(message.get("content"))
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
    elif role == "assistant":
        yield from _turn(message)
    else:
        yield {"role": role, "content": parts.from_chat_content(message.get("content"))}


def _turn(message: Item) -> Iterator[Item]:
    said = list(_said(message))
    if said:
        said[-1] |= {key: message[key] for key in CARRIED_FIELDS if message.get(key)}
    yield from said


def _said(message: Item) -> Iterator[Item]:
    thought, calls = message.get("reasoning_content") or message.get("reasoning"), message.get("tool_calls") or []
    if thought:
        if not isinstance(thought, str):
            raise TypeError("its reasoning is no text")
        yield responses.build_reasoning(thought)
    if content := _written(message):
        yield responses.build_message("") | {"content": content}
    elif not (thought or calls):
        yield responses.build_message("")
    for call in calls:
        function = call["function"]
        yield responses.build_function_call(function["name"], function.get("arguments") or "{}", call.get("id"))


def _written(message: Item) -> list[Item]:
    """The parts of what an assistant wrote, refusals among them."""
    content = message.get("content") or []
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    refusal = message.get("refusal")
    told = [*given, {"type": "refusal", "refusal": refusal}] if refusal else given
    found = parts.from_chat_content(told, written=True)
    assert isinstance(found, list), "a list becomes a list"
    return [part | {"annotations": []} if part["type"] == "output_text" else part for part in found]


__all__ = ["CHAT_API", "build_completion", "format_usage", "parse_message", "parse_request", "parse_tools"]

UNCHANGED_FIELDS = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "temperature",
        "top_logprobs",
        "top_p",
        "user",
    }
)
"""What has one name in both APIs."""

TRANSLATED_FIELDS = frozenset(
    {
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
KNOWN_FIELDS = UNCHANGED_FIELDS | TRANSLATED_FIELDS
REMOVED_FIELDS = ("functions", "function_call")


def parse_request(body: Item) -> Item:
    """Give the Responses request that asks what a chat *body* asks; raises `Malformed`."""
    messages = body.get("messages")
    if not is_object_list(messages):
        raise InvalidRequest("'messages' must be a list of messages, each with a role", "messages")
    for key in ("metadata", "response_format", "stream_options"):
        api.get_object(body, key)
    if body.get("n") not in (None, 1):
        raise InvalidRequest("this server gives one answer at a time; leave 'n' out", "n")
    if old := [key for key in REMOVED_FIELDS if body.get(key)]:
        raise InvalidRequest(f"{old[0]!r} is no longer spoken; send 'tools' and 'tool_choice'", old[0])
    kept = {
        key: value
        for key, value in drop_unknown_fields(body, KNOWN_FIELDS, where="Chat Completions").items()
        if value is not None and key not in TRANSLATED_FIELDS
    }
    told = _told(body)
    given = [item for message in messages for item in parse_message(message)]
    return kept | {key: value for key, value in told.items() if value is not None} | {"input": given}


def parse_tools(offered: object) -> list[Item]:
    """Give the tools *offered* in a chat body as a Responses request has them; raises `Malformed`."""
    if not is_object_list(offered):
        raise InvalidRequest("'tools' must be a list of tools", "tools")
    return [_tool(tool, number) for number, tool in enumerate(offered)]


def _told(body: Item) -> Item:
    """What a Responses request has under other names, or in another form."""
    limit, effort = body.get("max_completion_tokens"), body.get("reasoning_effort")
    return {
        "max_output_tokens": body.get("max_tokens") if limit is None else limit,
        "reasoning": {"effort": effort} if effort else None,
        "text": _text(body),
        "tools": parse_tools(body["tools"]) if body.get("tools") else None,
        "tool_choice": _parse_tool_choice(body.get("tool_choice")),
        "include": [LOGPROBS_INCLUDE] if body.get("logprobs") else None,
    }


def _text(body: Item) -> Item | None:
    form = _flat(body.get("response_format"))
    if form and not isinstance(form.get("type"), str):
        raise InvalidRequest("'response_format' must have a type", "response_format")
    text = {"format": form or None, "verbosity": body.get("verbosity")}
    return {key: value for key, value in text.items() if value is not None} or None


def _tool(tool: Item, number: int) -> Item:
    flat: Item = _flat(tool)
    if not isinstance(flat.get("name"), str):
        raise InvalidRequest(f"tools[{number}] is no function with a name", "tools")
    return flat


def _parse_tool_choice(choice: Any) -> Any:
    flat = _flat(choice) if isinstance(choice, dict) else choice
    if isinstance(flat, dict) and flat.get("type") == "allowed_tools":
        allowed = flat.get("tools")
        if not is_object_list(allowed):
            raise InvalidRequest("'tool_choice' must list the tools that are allowed", "tool_choice")
        return flat | {"tools": [_flat(tool) for tool in allowed]}
    return flat


def _flat(nested: Any) -> Any:
    """Give `{"type": "x", "x": {…}}` without its inner level, and anything else as it is."""
    kind = nested.get("type") if isinstance(nested, dict) else None
    inner = nested.get(kind) if isinstance(kind, str) else None
    return {"type": kind, **inner} if isinstance(inner, dict) else nested


CHAT_API = InboundApi(
    path="chat/completions",
    parse_request=parse_request,
    build_answer=build_answer,
    stream_events=stream_chunks,
    build_error=build_error,
    build_error_frames=build_error_frames,
    heartbeat=HEARTBEAT_FRAME,
)
