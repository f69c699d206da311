"""Completions: a Response as a chat completion, which says all of it in one message."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

from gymsdk import wire
from gymsdk.convert import parts
from gymsdk.convert.tokens import carried
from gymsdk.transcript import Item, text_of
from gymsdk.wire import TOKENS, Thoughts

FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}


def answer(response: Item, asked: Item) -> Item:
    """Give the completion for the chat body *asked*, its thoughts and its token ids where that wants them."""
    tags: Thoughts = "tags" if asked.get("separate_reasoning") is False else "field"
    told = completion(response, thoughts="drop" if asked.get("include_reasoning") is False else tags)
    message = told["choices"][0]["message"]
    if asked.get("return_token_ids") and TOKENS[1] in message:
        told["prompt_token_ids"] = message.get(TOKENS[0])
        told["choices"][0]["token_ids"] = message[TOKENS[1]]
    return told


def completion(response: Item, *, thoughts: Thoughts = "field") -> Item:
    """Give the chat completion that says what *response* says."""
    output = response["output"]
    choice = {
        "index": 0,
        "message": _message(output, thoughts),
        "logprobs": _logprobs(output),
        "finish_reason": _finish(response),
    }
    return {
        "id": wire.fresh("chatcmpl"),
        "object": "chat.completion",
        "created": int(response.get("created_at") or time.time()),
        "model": response.get("model") or "",
        "choices": [choice],
        "usage": usage(response.get("usage")),
        "system_fingerprint": None,
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


def _message(output: list[Item], thoughts: Thoughts) -> Item:
    text = "".join(text_of(item.get("content")) for item in output if _kind(item) == "message")
    thought = parts.thought(output) if thoughts != "drop" else ""
    refusal = "".join(part.get("refusal") or "" for part in _parts(output))
    calls = [_call(item) for item in output if _kind(item) == "function_call"]
    if thoughts == "tags":
        text = parts.tagged(thought, text)
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
    return message | carried(output)


def _kind(item: Item) -> str:
    kind: str = item.get("type") or "message"
    return kind


def _parts(output: list[Item]) -> list[Item]:
    contents = (item.get("content") for item in output if _kind(item) == "message")
    return [part for content in contents if isinstance(content, list) for part in content]


def _call(item: Item) -> Item:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _logprobs(output: list[Item]) -> Item | None:
    given: list[list[Any]] = [part["logprobs"] for part in _parts(output) if part.get("logprobs")]
    if not given:
        return None
    return {"content": given[0] if len(given) == 1 else list(chain.from_iterable(given)), "refusal": None}


def _finish(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in FINISH:
        return FINISH[reason]
    if response.get("status") == "incomplete":
        return "length"
    return "tool_calls" if any(_kind(item) == "function_call" for item in response["output"]) else "stop"
