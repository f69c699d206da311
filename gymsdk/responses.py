"""A model's response: asked for and checked, so that whatever a model does wrong is one `Failed`."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, TypeAlias, TypeGuard
from uuid import uuid4

from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.types import (
    Action,
    Content,
    Episode,
    Item,
    Message,
    Model,
    extract_text,
    is_content,
    is_reply,
    iter_tool_calls,
)

ResponseStatus: TypeAlias = Literal["completed", "incomplete", "failed"]
"""How a Response ended."""

Api: TypeAlias = Literal["chat", "responses"]
"""The two forms of the OpenAI API."""

ReasoningFormat: TypeAlias = Literal["field", "tags", "drop"]
"""How earlier reasoning goes back to a chat model: a field of its own, `<think>` text, or not at all.

A model asked in Responses is shown its items, or where they are to be dropped none but its own.
"""

FINISHED_STATUSES = (None, "completed", "incomplete")
"""How an answer says that it is one; an engine that gave it up, or still works at it, says otherwise."""

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What an item of a training model carries of its tokens: all three, or none."""

ECHOED_REQUEST_FIELDS = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "previous_response_id",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
"""What a Response repeats of its request where the request has it."""


def generate_id(prefix: str) -> str:
    """A new id: *prefix*, an underscore, 32 hexadecimal digits."""
    return f"{prefix}_{uuid4().hex}"


def build_message(text: str, *, id: str | None = None) -> Item:
    """The policy's reply *text* as an output item."""
    return {
        "id": id or generate_id("msg"),
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def build_function_call(
    name: str, arguments: str | Mapping[str, Any], call_id: str | None = None, *, id: str | None = None
) -> Item:
    """A call of the tool *name* as an output item, its arguments verbatim where they are text."""
    return {
        "id": id or generate_id("fc"),
        "type": "function_call",
        "call_id": call_id or generate_id("call"),
        "name": name,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        "status": "completed",
    }


def build_function_call_output(call_id: str, output: str | list[Item]) -> Item:
    """The answer to the call *call_id* as an input item."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def build_reasoning(*texts: str, id: str | None = None) -> Item:
    """The policy's thoughts as one output item, a summary part for each text."""
    summary = [{"type": "summary_text", "text": text} for text in texts]
    return {"id": id or generate_id("rs"), "type": "reasoning", "status": "completed", "summary": summary}


def is_finished(response: Item) -> bool:
    """Whether *response* is an answer: one that was aborted, or is yet to come, is none."""
    return response.get("status") in FINISHED_STATUSES


def build_usage(
    input_tokens: int = 0,
    output_tokens: int = 0,
    *,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> Item:
    """The usage of one call; a detail is null where the provider did not report it."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": input_tokens + output_tokens,
    }


def build_response(
    output: list[Item],
    *,
    model: str,
    usage: Item | None = None,
    status: ResponseStatus = "completed",
    reason: str | None = None,
    request: Item | None = None,
    id: str | None = None,
) -> Item:
    """A whole Response object around *output*; *reason* says why it is incomplete, *request* is echoed."""
    asked = request or {}
    return {
        "id": id or generate_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": output,
        "usage": usage,
        "parallel_tool_calls": _get_or_default(asked, "parallel_tool_calls", default=True),
        "tool_choice": _get_or_default(asked, "tool_choice", default="auto"),
        "tools": _get_or_default(asked, "tools", default=[]),
    } | {key: asked[key] for key in ECHOED_REQUEST_FIELDS if asked.get(key) is not None}


_OVERFLOW_MESSAGE = re.compile(
    r"context.?(length|window|size|limit)|maximum (model|allowed) length|prompt is too long"
    r"|max_tokens must be at least 1, got -",
    re.IGNORECASE,
)
# What llama.cpp calls it, whatever its status.
_LLAMA_CPP_OVERFLOW_TYPE = "exceed_context_size_error"
# Servers that check a request with pydantic quote it after these words.
_QUOTED_REQUEST = re.compile(r"""['"]input['"]\s*:|input_value\s*=""")
_CONTEXT_SIZE = re.compile(r"maximum context length (?:is|of) (\d+)", re.IGNORECASE)
_REQUESTED_TOKENS = re.compile(
    r"too large: (\d+)|requested (\d+) output tokens|(\d+) (?:tokens for|in) the completion", re.IGNORECASE
)


def is_context_overflow(status: int, body: bytes) -> bool:
    """Whether a server's refusal says that the prompt does not fit its model's context.

    Where the answer alone was to be longer than the context no prompt fits: that is a wrong request.
    """
    if status < 400:  # noqa: PLR2004 - what HTTP calls an error
        return False
    error = _parse_error(body)
    if status not in {400, 413, 422}:
        return error is not None and _get_error_type(error) == _LLAMA_CPP_OVERFLOW_TYPE
    said = list(_iter_error_texts(error)) if error is not None else []
    return any(map(_OVERFLOW_MESSAGE.search, said)) and not any(map(_requests_too_many_tokens, said))


def _requests_too_many_tokens(words: str) -> bool:
    room, requested = _CONTEXT_SIZE.search(words), _REQUESTED_TOKENS.search(words)
    if not room or not requested:
        return False
    return int(next(filter(None, requested.groups()))) >= int(room[1])


def _parse_error(body: bytes) -> Item | None:
    try:
        refused = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return refused if isinstance(refused, dict) else None


def _get_error_type(refused: Item) -> object:
    error = refused.get("error")
    return error.get("type") if isinstance(error, dict) else None


def _iter_error_texts(refused: Item) -> Iterator[str]:
    """What a refusal says in the server's own words: what it repeats of the request is not among them."""
    error = refused.get("error")
    own = [error.get("message"), error.get("code")] if isinstance(error, dict) else [error]
    for words in (*own, refused.get("message"), refused.get("detail")):
        if isinstance(words, str):
            yield _QUOTED_REQUEST.split(words)[0]


def build_overflow_response(body: str, *, model: str, request: Item) -> Item:
    """The Response to a prompt that does not fit: incomplete and empty, with what the server said of it."""
    none = build_usage(cached_tokens=0, reasoning_tokens=0)
    empty = build_response([], model=model, usage=none, status="incomplete", request=request)
    return empty | {"incomplete_details": {"reason": "max_output_tokens", "message": body[:500]}}


def _get_or_default(request: Item, key: str, *, default: object) -> object:
    value = request.get(key)
    return default if value is None else value


MAX_EXCERPT_CHARS = 200
"""Characters of an unreadable item that a message shows."""


async def query_model(model: Model, request: Item, *, episode: Episode | None, label: str = "the model") -> Item:
    """Give *model*'s response to *request*; raises `Failed` where it gives none, or one that cannot be read."""
    response = await query_model_allowing_filtered(model, request, episode=episode, label=label)
    if (response.get("incomplete_details") or {}).get("reason") == "content_filter":
        # What was held back is neither an answer nor a budget that ran out: there is nothing to grade.
        raise Failed(f"{label}'s answer was held back by a content filter", kind="model_withheld")
    return response


async def query_model_allowing_filtered(
    model: Model, request: Item, *, episode: Episode | None, label: str = "the model"
) -> Item:
    """Give *model*'s response to *request* like `asked`, also one that a content filter held back."""
    try:
        response = await model.respond(request, episode=episode)
    except EpisodeError:
        raise
    except asyncio.CancelledError as error:
        if is_task_cancelled():
            raise
        # Nobody cancelled this: let through, it would pass for the end of the whole run.
        raise Failed(f"{label} raised CancelledError", kind="model_raised", retryable=True) from error
    except Exception as error:
        kind = "model_timeout" if isinstance(error, TimeoutError) else "model_raised"
        raise Failed(f"{label} raised {type(error).__name__}: {error}", kind=kind, retryable=True) from error
    if not is_response(response):
        raise _build_invalid_response_error(response, label)
    if response.get("error") or not is_finished(response):
        why = response.get("error") or f"its answer is {response.get('status')!r}"
        raise Failed(f"{label} failed: {why}", kind="model_error", retryable=True)
    return response


def check_model(model: object) -> None:
    """Refuse a *model* that cannot be asked; raises `UsageError`."""
    kind, respond = type(model).__name__, getattr(model, "respond", None)
    advice = "write `async def respond(self, request, *, episode=None)`"
    if not callable(respond):
        made = "take one of gymsdk.model(name)"
        raise UsageError(f"a model is an object with a `respond`, which {kind} has not; {advice}, or {made}")
    try:
        taken = inspect.signature(respond)
    except ValueError:
        # What is written in C need not say what it takes.
        return
    try:
        taken.bind({}, episode=None)
    except TypeError as error:
        raise UsageError(f"the `respond` of model {kind} cannot be asked: {error}; {advice}") from None


def is_task_cancelled() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_incomplete_response(response: Item) -> bool:
    """Whether the model ran out of tokens before it had finished."""
    return response.get("status") == "incomplete" or bool(response.get("incomplete_details"))


def is_response(value: object) -> bool:
    """Return whether *value* is a Response object as far as gymsdk reads one."""
    return _has_output(value) and all(map(_is_valid_item, value["output"]))


def _has_output(value: object) -> TypeGuard[Item]:
    return isinstance(value, dict) and isinstance(value.get("output"), list)


def _is_valid_item(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    return is_content(item.get("content")) and isinstance(item.get("type", "message"), str)


def _build_invalid_response_error(value: object, who: str) -> Failed:
    """Return the failure of an answer that is no Response object.

    An answer without a list of items may come from a proxy and change with the next try. One whose items have the wrong
    types is what the model's server makes of its model, and stays so.
    """
    message = f"{who}'s answer is no Response object"
    if not _has_output(value):
        return Failed(message, kind="model_bad_answer", retryable=True)
    number, item = next((number, item) for number, item in enumerate(value["output"]) if not _is_valid_item(item))
    wrong = repr(item)[:MAX_EXCERPT_CHARS]
    expected = "an item is an object whose `content` is text or a list of parts"
    return Failed(f"{message}: item {number} of its output is {wrong}, and {expected}", kind="model_bad_answer")


MAX_OUTPUT_CHARS = 4 * 2**20
"""Characters of one output where nobody says otherwise; those of pictures and files in it count too."""

TRUNCATION_NOTE = "\n[cut here: this output has {whole} characters, and at most {longest} of one are shown]"
OMITTED_PART_NOTE = "[left out: {kind} of {size} characters, where at most {longest} of one output are shown]"


def truncate_output(output: Content, max_chars: int = MAX_OUTPUT_CHARS) -> Content:
    """Give *output* as it is, or *longest* characters of it, the last of which say that there was more."""
    if isinstance(output, str):
        return output if len(output) <= max_chars else _truncate_text(output, max_chars, max_chars)
    if sum(map(_count_chars, output)) <= max_chars:
        return output
    return [*_truncate_parts(output, max_chars)]


def _truncate_parts(parts: list[Item], longest: int) -> Iterator[Item]:
    """Yield what fits of *parts*: texts are cut, of anything else half would be none."""
    left = longest
    for part in parts:
        size, text = _count_chars(part), part.get("text")
        if size <= left:
            left -= size
            yield part
        elif isinstance(text, str):
            yield {**part, "text": _truncate_text(text, left, longest)}
            left = 0
        else:
            absent = OMITTED_PART_NOTE.format(kind=part.get("type"), size=size, longest=longest)
            yield {"type": "input_text", "text": absent}


def _truncate_text(text: str, left: int, longest: int) -> str:
    note = TRUNCATION_NOTE.format(whole=len(text), longest=longest)
    return text[: max(0, left - len(note))] + note


def _count_chars(part: Item) -> int:
    return sum(len(value) for value in part.values() if isinstance(value, str))


NOT_RUN_OUTPUT = '{"error":"not run: the episode is over"}'
"""What answers a call that came after the end of its episode."""


def parse_actions(output: Iterable[Item]) -> list[Action]:
    """Give what one turn does: its tool calls in order, or else its text as one reply; nothing if it has neither."""
    items = list(output)
    calls: list[Action] = list(iter_tool_calls(items))
    if calls:
        return calls
    text = "".join(extract_text(item.get("content")) for item in items if is_reply(item))
    return [Message(role="assistant", content=text)] if text else []


def iter_turns(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the policy's items turn by turn: an item of the environment ends a turn."""
    whole = list(items)
    return (whole[span] for span in iter_turn_spans(whole))


def iter_turn_spans(items: Sequence[Item]) -> Iterator[slice]:
    """Yield where in *items* each turn lies."""
    start = None
    for index, item in enumerate(items):
        if is_policy_item(item):
            start = index if start is None else start
        elif start is not None:
            yield slice(start, index)
            start = None
    if start is not None:
        yield slice(start, len(items))


def get_played_actions(items: Sequence[Item], span: slice) -> list[Action]:
    """Give the actions of one turn that were played: not a call without an answer, nor one answered `not run`."""
    after = takewhile(lambda item: not is_policy_item(item), items[span.stop :])
    run = [item.get("call_id") for item in after if item.get("output", NOT_RUN_OUTPUT) != NOT_RUN_OUTPUT]
    return [act for act in parse_actions(items[span]) if isinstance(act, Message) or act.call_id in run]


def is_policy_item(item: Item) -> bool:
    """Whether the policy made *item*, not the environment."""
    # No set, here and above: a client's item may have anything for its type and its id.
    return is_reply(item) or item.get("type") in ("function_call", "reasoning")
