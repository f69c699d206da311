"""Chunks: a chat completion as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymsdk.convert.tokens import CARRIED
from gymsdk.transcript import Item

from .errors import error
from .face import Trouble
from .sse import DONE, frame, line

HEAD = ("id", "created", "model", "system_fingerprint")


def events(answer: Item, asked: Item) -> Iterator[bytes]:
    """Give the frames that tell *answer*, its usage where the body *asked* wants it."""
    counted = bool((asked.get("stream_options") or {}).get("include_usage"))
    head: Item = {"object": "chat.completion.chunk", **{key: answer[key] for key in HEAD if key in answer}}
    if counted:
        head["usage"] = None
    prompt = {"prompt_token_ids": answer["prompt_token_ids"]} if "prompt_token_ids" in answer else {}
    for choice in _choices(answer["choices"][0]):
        yield frame(line(head | prompt | {"choices": [choice]}))
        prompt = {}
    if counted:
        yield frame(line(head | {"choices": [], "usage": answer["usage"]}))
    yield DONE


def broken(trouble: Trouble) -> bytes:
    """Give the frames of a stream that ends in *trouble*."""
    return frame(line(error(trouble))) + DONE


def _choices(choice: Item) -> Iterator[Item]:
    message, logprobs = choice["message"], choice.get("logprobs")
    yield _choice({"role": "assistant", "content": None if message["content"] is None else "", "refusal": None})
    if thoughts := {key: message[key] for key in ("reasoning_content", "reasoning") if message.get(key)}:
        yield _choice(thoughts)
    if message["content"] or logprobs:
        yield _choice({"content": message["content"]}, logprobs=logprobs)
    if message.get("refusal"):
        yield _choice({"refusal": message["refusal"]})
    for index, call in enumerate(message.get("tool_calls") or []):
        yield from _call(index, call)
    # A client adds deltas up, lists too: the tokens come once, with the end.
    tokens = {key: message[key] for key in CARRIED if key in message}
    ids = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
    yield _choice(tokens, finish=choice["finish_reason"]) | ids


def _call(index: int, call: Item) -> Iterator[Item]:
    function = call["function"]
    opened = {"index": index, "id": call["id"], "type": "function", "function": function | {"arguments": ""}}
    yield _choice({"tool_calls": [opened]})
    if function["arguments"]:
        yield _choice({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})


def _choice(delta: Item, *, logprobs: Any = None, finish: str | None = None) -> Item:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
