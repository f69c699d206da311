"""Responses for those who speak Responses: what may be sent, and what a server's answer must hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymsdk import usage as counts
from gymsdk import wire
from gymsdk.errors import Failed
from gymsdk.transcript import Item, are_objects, is_reply, text_of

from . import keys, parts, tokens
from .extras import plain

PATH = "responses"
DETAILS = ("input_tokens_details", "output_tokens_details")


def body(request: Item) -> Item:
    """Give the body to send: *request* written out, and never streamed."""
    known = keys.known(request, keys.RESPONSES, where="a Responses request")
    if not request.get("tools"):
        parts.check_choice(request.get("tool_choice"))
    return {key: value for key, value in plain(known).items() if key not in {"stream", "stream_options"}}


def response(answer: Any, request: Item, *, strict: bool = False) -> Item:
    """Give the *answer* to *request* as a whole Response; raises `Failed` where it is none, or says that it failed.

    Thoughts that stand in a text become items of their own. The items' tokens pass as they are; *strict* holds them to
    their form.
    """
    if not isinstance(answer, dict) or not are_objects(answer.get("output")):
        message = f"the model's answer is no Response: {answer}"
        raise Failed(message, kind="model_bad_answer", retryable=True)
    if answer.get("error") or not wire.is_ended(answer):
        told = answer.get("error") or f"its answer is {answer['status']!r}"
        raise Failed(f"the model failed: {told}", kind="model_error", retryable=True)
    if strict:
        for item in answer["output"]:
            tokens.check(item)
    whole = wire.response([], model=str(request.get("model", "")), request=request)
    return whole | answer | {"output": list(_thought_through(answer["output"])), "usage": _usage(answer)}


def _thought_through(output: list[Item]) -> Iterator[Item]:
    """The items of *output*, each text after the thoughts that a server has left in it."""
    for item in output:
        if is_reply(item) and _is_tagged(item.get("content")):
            yield from _apart(item)
        else:
            yield item


def _is_tagged(content: object) -> bool:
    if isinstance(content, str):
        return parts.OPENING in content or parts.CLOSING in content
    return are_objects(content) and any(_is_tagged(part.get("text")) for part in content)


def _apart(item: Item) -> Iterator[Item]:
    """The thoughts of a tagged *item*, and what is left of it; what carries the tokens is the last."""
    content = item["content"]
    given = [{"type": "output_text", "text": content, "annotations": []}] if isinstance(content, str) else content
    read = [(part, *parts.thoughts(parts.words(part.get("text")))) for part in given]
    thoughts = [thought for _, found, _ in read for thought in found]
    left = [part | {"text": text} if "text" in part else part for part, _, text in read]
    said: list[Item] = [wire.reasoning(*thoughts)] if thoughts else []
    if not thoughts or text_of(left).strip() or any(part.get("refusal") for part in left):
        said.append(item | {"content": left})
    said[-1] |= {key: item[key] for key in tokens.CARRIED if key in item}
    yield from said


def _usage(answer: Item) -> Item | None:
    """The usage of an *answer*, its counts made numbers, and null where nothing readable was reported."""
    reported = answer.get("usage")
    if not isinstance(reported, dict) or not reported:
        return None
    counted = counts.body(counts.of(answer))
    details = {key: reported[key] | counted[key] for key in DETAILS if isinstance(reported.get(key), dict)}
    return reported | counted | details
