"""Offer Anthropic's Messages API: parse its requests into Responses requests, and build messages from Responses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gymsdk import responses
from gymsdk.convert import api
from gymsdk.convert.anthropic_content import build_blocks, parse_message, parse_parts
from gymsdk.convert.api import ApiError, InboundApi, InvalidRequest, build_frame, dump_line
from gymsdk.convert.chat import ENGINE_ANSWER_FIELDS
from gymsdk.convert.deferred_tools import load_deferred_tools
from gymsdk.convert.request_keys import drop_foreign_keys
from gymsdk.convert.tokens import get_carried_fields
from gymsdk.jsonl import dump_json
from gymsdk.responses import parse_usage
from gymsdk.types import Item

PING_FRAME = build_frame(b'{"type":"ping"}', "ping")
"""The heartbeat, which clients ignore."""

EMPTY_BLOCKS: MappingProxyType[str, Item] = MappingProxyType(
    {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
)
"""By type of block, the fields that are empty in its first event because deltas fill them."""

OVERFLOW_START = "prompt is too long"

END_FIELDS = ("stop_reason", "stop_sequence", "stop_details")
"""The fields of a message that its last events have."""

ERROR_TYPES = MappingProxyType(
    {
        401: "authentication_error",
        402: "billing_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""The `type` of an error by HTTP status; others are `api_error` or `invalid_request_error`."""


def build_error(error: ApiError) -> Item:
    """Return the body of *error* in the format of the Anthropic API; its SDK reads the code in the details."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"  # noqa: PLR2004 - HTTP server errors
    kind = ERROR_TYPES.get(error.status, default)
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": error.message} | details}


def format_overflow(message: str) -> str:
    """Return the error message for a prompt that is too long, from the *message* of the engine.

    Programs recognize the beginning of Anthropic's own message.
    """
    return message if message.lower().startswith(OVERFLOW_START) else f"{OVERFLOW_START}: {message}"


def build_error_frames(error: ApiError) -> bytes:
    """Return the last frame of a stream that fails."""
    return build_frame(dump_line(build_error(error)), "error")


def stream_events(answer: Item, _: Item) -> Iterator[bytes]:
    """Yield the frames of the events for *answer*."""
    for event in _build_events(answer):
        yield build_frame(dump_line(event), event["type"])


def _build_events(answer: Item) -> Iterator[Item]:
    usage = answer["usage"]
    initial_usage = {key: value for key, value in usage.items() if key != "output_tokens_details"}
    initial = {"content": [], "usage": initial_usage | {"output_tokens": 0}} | dict.fromkeys(END_FIELDS)
    yield {"type": "message_start", "message": answer | initial}
    for index, block in enumerate(answer["content"]):
        empty = EMPTY_BLOCKS.get(block["type"], {})
        yield {"type": "content_block_start", "index": index, "content_block": block | empty}
        for delta in _build_deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {key: answer[key] for key in END_FIELDS}, "usage": usage}
    yield {"type": "message_stop"}


def _build_deltas(block: Item) -> list[Item]:
    match block["type"]:
        case "text":
            return [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "tool_use":
            return [{"type": "input_json_delta", "partial_json": dump_json(block["input"]).decode()}]
        case _:
            return []


TRANSLATED_FIELDS = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "max_tokens",
        "mcp_servers",
        "messages",
        "metadata",
        "output_config",
        "output_format",
        # Its values are not those of the other APIs.
        "service_tier",
        "stop",
        "stop_sequences",
        "stream",
        "system",
        "thinking",
        "tool_choice",
        "tools",
    }
)
"""The fields that Responses has under another name or in another form, or not at all."""

THINKING_BUDGET_EFFORTS = ((16_384, "high"), (4_096, "medium"), (0, "low"))
"""The reasoning effort for a thinking budget of at least so many tokens."""

EFFORT_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The effort to request for each effort of Messages; engines support only three."""

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
"""The stop reason for each reason why a Response is incomplete."""

STOP_SEQUENCE_FIELD = "stop_sequence"
"""The field, not part of Responses, under which a Response has the stop sequence that ended it."""

# Claude Code starts its instructions with a line that differs in each request. An engine that received it could not
# reuse its cache for the rest of the prompt.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def parse_request(body: Item) -> Item:
    """Return the Responses request for the *body* of a Messages request.

    Fields for engines are kept, and so is `metadata` apart from the user's id. If the last message is the assistant's,
    it is part of the input; the engine decides whether to continue it.

    Raises:
        InvalidRequest: The body is invalid, or asks the server to call MCP servers.
    """
    if body.get("mcp_servers"):
        raise InvalidRequest("this server does not call 'mcp_servers'; send their tools as 'tools'", "mcp_servers")
    body = load_deferred_tools(body)
    known_fields = drop_foreign_keys(body, TRANSLATED_FIELDS, where="Messages")
    passed_fields = {key: value for key, value in known_fields.items() if key not in TRANSLATED_FIELDS}
    translated = {
        "instructions": parse_instructions(body.get("system")),
        "max_output_tokens": _parse_max_tokens(body),
        "reasoning": parse_reasoning(body),
        "stop": _parse_stop_sequences(body),
        "text": parse_text_format(body),
        "tools": parse_tools(body.get("tools")),
    }
    messages = {"input": _parse_messages(body.get("messages"))}
    request = passed_fields | translated | parse_tool_choice(body) | _parse_metadata(body) | messages
    return {key: value for key, value in request.items() if value is not None}


def build_answer(response: Item, body: Item) -> Item:
    """Return the message for *response*."""
    engine_fields = {key: response[key] for key in ENGINE_ANSWER_FIELDS if response.get(key) is not None}
    return engine_fields | {
        "id": responses.generate_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or body.get("model") or "",
        "content": build_blocks(_select_output(response["output"], body)),
        "stop_reason": _get_stop_reason(response),
        "stop_sequence": response.get(STOP_SEQUENCE_FIELD),
        "stop_details": None,
        "usage": format_usage(response),
    }


def _select_output(output: list[Item], body: Item) -> list[Item]:
    """Return the items for the client. If it disabled thinking, reasoning is removed, but its token fields are kept.

    Anthropic's own servers return reasoning only on request. Here it is returned unless disabled: a client cannot send
    back reasoning that it did not receive, and engines depend on it.
    """
    if (body.get("thinking") or {}).get("type") != "disabled":
        return output
    items = [dict(item) for item in output if item.get("type") != "reasoning"]
    if items:
        # A later request must carry the ids of the whole turn, of its reasoning, too.
        items[-1] |= get_carried_fields(output)
    return items


def format_usage(response: Item) -> Item:
    """Return the usage of *response* in the format of Messages, where input tokens exclude cached tokens."""
    usage = parse_usage(response)
    cached = min(usage.cached_tokens or 0, usage.input_tokens)
    counts: Item = {
        "input_tokens": usage.input_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def format_token_count(tokens: int) -> Item:
    """Return the answer of `/v1/messages/count_tokens` for a prompt of so many *tokens*."""
    return {"input_tokens": tokens}


def parse_instructions(system: Any) -> str | None:
    """Return the *system* prompt, a string or a list of text blocks, as one text; `None` if it is empty."""
    if system is None:
        return None
    texts = [api.get_text(part, "text", "system") for part in parse_parts(system, "system")]
    return "\n\n".join(filter(None, (_BILLING_HEADER.sub("", text) for text in texts))) or None


def parse_tools(tools: Any) -> list[Item] | None:
    """Return *tools* in the format of Responses, `None` if there are none.

    Raises:
        InvalidRequest: A tool is invalid, or one that Anthropic's servers run themselves.
    """
    definitions = api.check_objects(tools or [], "tools")
    return [_parse_tool(tool, f"tools.{number}") for number, tool in enumerate(definitions)] or None


def parse_tool_choice(body: Item) -> Item:
    """Return the `tool_choice` and `parallel_tool_calls` fields for *body*."""
    choice = api.get_object(body, "tool_choice")
    if not choice:
        return {}
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    kind = choice.get("type")
    if kind == "tool":
        name = api.get_text(choice, "name", "tool_choice")
        return parallel | {"tool_choice": {"type": "function", "name": name}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise api.build_invalid_field("tool_choice.type", "'auto', 'any', 'tool' or 'none'")
    return parallel | {"tool_choice": TOOL_CHOICES[kind]}


def parse_reasoning(body: Item) -> Item | None:
    """Return the `reasoning` field for *body*, `None` if it leaves the effort to the model.

    An effort takes precedence over a thinking budget. Disabled thinking sets no effort, because few engines can turn
    reasoning off.
    """
    effort = api.get_object(body, "output_config").get("effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORT_LEVELS:
            raise api.build_invalid_field("output_config.effort", "'low', 'medium', 'high', 'xhigh' or 'max'")
        return {"effort": EFFORT_LEVELS[effort]}
    thinking = api.get_object(body, "thinking")
    budget = thinking.get("budget_tokens")
    if thinking.get("type") != "enabled" or budget is None:
        return None
    if not isinstance(budget, int):
        raise api.build_invalid_field("thinking.budget_tokens", "an integer")
    return {"effort": next((effort for min_budget, effort in THINKING_BUDGET_EFFORTS if budget >= min_budget), "low")}


def parse_text_format(body: Item) -> Item | None:
    """Return the `text` field for *body*, with the schema that the answer must follow; `None` if there is none."""
    config = api.get_object(body, "output_config")
    current_format, old_format = (
        api.get_object(config, "format", "output_config"),
        api.get_object(body, "output_format"),
    )
    text_format, where = current_format or old_format, "output_config.format" if current_format else "output_format"
    if not text_format:
        return None
    schema = text_format.get("schema")
    if text_format.get("type") != "json_schema" or not isinstance(schema, dict):
        raise api.build_invalid_field(where, "an object with type 'json_schema' and a schema")
    return {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}


def _parse_tool(tool: Item, where: str) -> Item:
    name = api.get_text(tool, "name", where)
    kind = tool.get("type") or "custom"
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        if kind != "custom":
            raise InvalidRequest(
                f"{where}: this server does not run the tool {kind!r}; send a tool with a name and an input_schema",
                param=where,
            )
        raise api.build_invalid_field(f"{where}.input_schema", "an object")
    function = {"type": "function", "name": name, "parameters": schema, "strict": bool(tool.get("strict"))}
    return function | ({"description": tool["description"]} if tool.get("description") is not None else {})


def _parse_messages(messages: Any) -> list[Item]:
    objects = api.check_objects(messages, "messages")
    if not objects:
        raise InvalidRequest("messages must have at least one message", "messages")
    return [item for number, message in enumerate(objects) for item in parse_message(message, f"messages.{number}")]


def _parse_max_tokens(body: Item) -> int | None:
    limit = body.get("max_tokens")
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
        return limit
    raise api.build_invalid_field("max_tokens", "a positive integer")


def _parse_stop_sequences(body: Item) -> Any:
    """Return the stop sequences, or without them the field `stop` that engines accept."""
    sequences = body.get("stop_sequences")
    if not sequences:
        return body.get("stop")
    if isinstance(sequences, list) and all(isinstance(sequence, str) for sequence in sequences):
        return sequences
    raise api.build_invalid_field("stop_sequences", "a list of strings")


def _parse_metadata(body: Item) -> Item:
    metadata = api.get_object(body, "metadata")
    rest = {key: value for key, value in metadata.items() if key != "user_id"}
    user = {"user": metadata["user_id"]} if metadata.get("user_id") is not None else {}
    return user | {"metadata": rest or None}


def _get_stop_reason(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in STOP_REASONS:
        return STOP_REASONS[reason]
    if response.get("status") == "incomplete":
        return "max_tokens"
    if any(item.get("type") == "function_call" for item in response["output"]):
        return "tool_use"
    if response.get(STOP_SEQUENCE_FIELD) is not None:
        return "stop_sequence"
    return "refusal" if any(map(_is_refusal, response["output"])) else "end_turn"


def _is_refusal(item: Item) -> bool:
    content = item.get("content")
    return isinstance(content, list) and any(part.get("type") == "refusal" for part in content)


MESSAGES_API = InboundApi(
    path="messages",
    parse_request=parse_request,
    build_answer=build_answer,
    stream_events=stream_events,
    build_error=build_error,
    build_error_frames=build_error_frames,
    heartbeat=PING_FRAME,
    format_overflow=format_overflow,
    refuses_overflow=True,
    continues_last_turn=True,
)

COUNT_TOKENS_API = replace(MESSAGES_API, path="messages/count_tokens")
