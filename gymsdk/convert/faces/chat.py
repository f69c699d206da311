"""Responses for those who speak Chat Completions: a chat body becomes a request, a Response a completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gymsdk import wire
from gymsdk.convert import parts
from gymsdk.convert.extras import BODY
from gymsdk.transcript import Item, text_of

KEPT = ("metadata", "model", "parallel_tool_calls", "service_tier", "temperature", "top_logprobs", "top_p", "user")
TRANSLATED = {
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "tools",
    "verbosity",
}
TRANSPORT = {"n", "stream", "stream_options"}
FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def request(body: Item) -> Item:
    """Give the Responses request that asks what a chat *body* asks; what Responses lacks rides in its metadata."""
    kept = {key: body[key] for key in KEPT if body.get(key) is not None}
    strange = body.keys() - {*KEPT, *TRANSLATED, *TRANSPORT}
    extra = {key: body[key] for key in sorted(strange) if body[key] is not None}
    if extra:
        kept["metadata"] = {**kept.get("metadata", {}), BODY: json.dumps(extra)}
    told = {
        "max_output_tokens": body.get("max_completion_tokens") or body.get("max_tokens"),
        "reasoning": {"effort": body["reasoning_effort"]} if body.get("reasoning_effort") else None,
        "text": _text(body),
        "tools": [_flat(tool, "function") for tool in body.get("tools") or []] or None,
        "tool_choice": _flat(body.get("tool_choice"), "function"),
    }
    items = [item for message in body["messages"] for item in _items(message)]
    return kept | {key: value for key, value in told.items() if value is not None} | {"input": items}


def completion(response: Item) -> Item:
    """Give the chat completion that says what *response* says."""
    choice = {"index": 0, "message": _message(response["output"]), "logprobs": None, "finish_reason": _finish(response)}
    return {
        "id": wire.fresh("chatcmpl"),
        "object": "chat.completion",
        "created": response["created_at"],
        "model": response["model"],
        "choices": [choice],
        "usage": usage(response.get("usage")),
    }


def usage(reported: Item | None) -> Item | None:
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


def _items(message: Item) -> Iterator[Item]:
    """The items a chat *message* amounts to; an assistant's are its thoughts, its text and its calls."""
    if message["role"] == "tool":
        output = parts.from_chat(message.get("content"))
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
        return
    if message["role"] != "assistant":
        yield {"role": message["role"], "content": parts.from_chat(message.get("content"))}
        return
    items = list(_spoken(message))
    if items:
        items[-1] |= {key: message[key] for key in wire.TOKENS if message.get(key)}
    yield from items


def _spoken(message: Item) -> Iterator[Item]:
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        yield wire.reasoning(thought)
    if text := text_of(message.get("content")):
        yield wire.message(text)
    for call in message.get("tool_calls") or []:
        yield wire.function_call(call["function"]["name"], call["function"].get("arguments") or "{}", call.get("id"))


def _text(body: Item) -> Item | None:
    form = _flat(body.get("response_format"), "json_schema")
    text = {"format": form, "verbosity": body.get("verbosity")}
    return {key: value for key, value in text.items() if value is not None} or None


def _flat(nested: Any, key: str) -> Any:
    """Give `{"type": key, key: {…}}` without its inner level, and anything else as it is."""
    if isinstance(nested, dict) and nested.get("type") == key and isinstance(nested.get(key), dict):
        return {"type": key, **nested[key]}
    return nested


def _message(output: list[Item]) -> Item:
    said = [text_of(item.get("content")) for item in output if item["type"] == "message"]
    thoughts = [text_of(item.get("summary")) for item in output if item["type"] == "reasoning"]
    calls = [_call(item) for item in output if item["type"] == "function_call"]
    message: Item = {"role": "assistant", "content": "".join(said) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message | {key: item[key] for item in output for key in wire.TOKENS if key in item}


def _call(item: Item) -> Item:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _finish(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in FINISH:
        return FINISH[reason]
    return "tool_calls" if any(item["type"] == "function_call" for item in response["output"]) else "stop"
