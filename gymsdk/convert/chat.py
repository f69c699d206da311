"""Chat Completions for those who speak Responses: a request becomes a chat body, a completion a Response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from typing import Any

from gymsdk import usage as counts
from gymsdk import wire
from gymsdk.errors import Failed
from gymsdk.transcript import Content, Item, is_reply, text_of

from . import parts
from .extras import extras
from .parts import untranslatable

PATH = "chat/completions"
REFUSED = ("conversation", "previous_response_id", "prompt")
TRANSLATED = {
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
}
MEANINGLESS = {"background", "include", "max_tool_calls", "store", "stream", "stream_options", "truncation"}
REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


def body(request: Item, *, thoughts: wire.Thoughts = "field", limit: str = "max_tokens") -> Item:
    """Give the chat body that asks what *request* asks; *limit* is its word for `max_output_tokens`."""
    if refused := [key for key in REFUSED if request.get(key) is not None]:
        raise untranslatable(f"`{refused[0]}`")
    silent = TRANSLATED | MEANINGLESS
    kept = {key: value for key, value in request.items() if value is not None and key not in silent}
    told = {limit: request.get("max_output_tokens")} | _reasoning(request) | _text(request) | _tools(request)
    said = {"messages": messages(request, thoughts=thoughts)}
    return extras(request) | kept | {key: value for key, value in told.items() if value is not None} | said


def messages(request: Item, *, thoughts: wire.Thoughts = "field") -> list[Item]:
    """Give the chat messages of *request*: what the policy did in one turn is one message, and so is the system's."""
    given: Content = request.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    said: list[Item] = []
    for by_policy, group in groupby(items, _by_policy):
        run = list(group)
        said += [_turn(run, thoughts)] if by_policy else [_message(item) for item in run]
    lead = list(takewhile(lambda message: message["role"] == "system", said))
    words = [text for text in (request.get("instructions"), *(text_of(one["content"]) for one in lead)) if text]
    return ([{"role": "system", "content": "\n\n".join(words)}] if words else []) + said[len(lead) :]


def response(completion: Any, request: Item) -> Item:
    """Give the Response that a chat *completion* of *request* amounts to."""
    try:
        return _response(completion, request)
    except (LookupError, TypeError, AttributeError) as error:
        message = f"the model's answer is no chat completion: {completion}"
        raise Failed(message, kind="model_bad_answer", retryable=True) from error


def usage(reported: object) -> Item | None:
    """Give the usage of a completion in the words of a Response, null where nothing readable was *reported*."""
    if not isinstance(reported, dict) or not reported:
        return None
    told = {
        "input_tokens": reported.get("prompt_tokens"),
        "input_tokens_details": reported.get("prompt_tokens_details"),
        "output_tokens": reported.get("completion_tokens"),
        "output_tokens_details": reported.get("completion_tokens_details"),
    }
    return counts.body(counts.of({"usage": told}))


def tokens(completion: Item, choice: Item) -> Item:
    """Give the token ids and log-probabilities of *choice* where the server sent all of them, else nothing."""
    message = choice["message"]
    if all(message.get(key) is not None for key in wire.TOKENS):
        return {key: message[key] for key in wire.TOKENS}
    prompt, generation = completion.get("prompt_token_ids"), choice.get("token_ids")
    chances = [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
    if prompt is None or generation is None or len(chances) != len(generation):
        return {}
    return dict(zip(wire.TOKENS, (prompt, generation, chances), strict=True))


def _response(completion: Item, request: Item) -> Item:
    choice = completion["choices"][0]
    output = list(_output(choice["message"]))
    output[-1] |= tokens(completion, choice)
    reason = REASONS.get(choice.get("finish_reason"))
    return wire.response(
        output,
        model=completion.get("model") or request.get("model") or "",
        usage=usage(completion.get("usage")),
        status="incomplete" if reason else "completed",
        reason=reason,
        request=request,
    )


def _by_policy(item: Item) -> bool:
    return item.get("type") in {"reasoning", "function_call"} or is_reply(item)


def _turn(items: list[Item], thoughts: wire.Thoughts) -> Item:
    """The one assistant message of a turn's *items*."""
    text = "".join(text_of(parts.to_chat(item.get("content"))) for item in items if is_reply(item))
    thought = "\n".join(_thoughts(items)) if thoughts != "drop" else ""
    calls = [_call(item) for item in items if item.get("type") == "function_call"]
    if thoughts == "tags":
        text = parts.tagged(thought, text)
    message: Item = {"role": "assistant", "content": text or (None if calls else "")}
    if thought and thoughts == "field":
        # Servers are divided over the name of the field.
        message |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        message["tool_calls"] = calls
    return message | {key: item[key] for item in items for key in wire.TOKENS if item.get(key)}


def _thoughts(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        if item.get("type") == "reasoning":
            yield from (part["text"] for part in item.get("summary") or item.get("content") or [] if part.get("text"))


def _call(item: Item) -> Item:
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _message(item: Item) -> Item:
    if item.get("type") == "function_call_output":
        content = parts.to_chat(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if item.get("type", "message") != "message" or "role" not in item:
        raise untranslatable(f"an input item of type {item.get('type')!r}")
    # Few chat templates know a developer.
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": parts.to_chat(item.get("content"))}


def _reasoning(request: Item) -> Item:
    return {"reasoning_effort": (request.get("reasoning") or {}).get("effort")}


def _text(request: Item) -> Item:
    text = request.get("text") or {}
    form = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        schema = {key: value for key, value in form.items() if key != "type"}
        form = {"type": "json_schema", "json_schema": schema}
    return {"response_format": form if form["type"] != "text" else None, "verbosity": text.get("verbosity")}


def _tools(request: Item) -> Item:
    if not request.get("tools"):
        return {}
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    tools = [_tool(tool) for tool in request["tools"]]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": request.get("parallel_tool_calls")}


def _tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        raise untranslatable(f"a tool of type {tool.get('type')!r}")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _output(message: Item) -> Iterator[Item]:
    """The items of an assistant *message*: thoughts, then the text, then the calls; at least one."""
    tagged, text = parts.thoughts(text_of(message.get("content")))
    field = message.get("reasoning_content") or message.get("reasoning")
    thoughts = ([field] if field else []) + tagged
    if thoughts:
        yield wire.reasoning(*thoughts)
    calls = message.get("tool_calls") or []
    if message.get("refusal"):
        yield _refusal(message["refusal"])
    elif text.strip() or not (calls or thoughts):
        yield wire.message(text)
    for call in calls:
        function = call["function"]
        yield wire.function_call(function["name"], function.get("arguments") or "{}", call.get("id"))


def _refusal(words: str) -> Item:
    return wire.message("") | {"content": [{"type": "refusal", "refusal": words}]}
