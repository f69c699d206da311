"""Messages of Anthropic as a server speaks it: its body becomes a Responses request, a Response a message."""

from __future__ import annotations

import re
from typing import Any

from gymsdk import responses
from gymsdk import types as counts
from gymsdk.convert import anthropic_content, api
from gymsdk.convert.anthropic_content import build_blocks, parse_message
from gymsdk.convert.anthropic_stream import PING_FRAME, build_error, build_error_frames, stream_events
from gymsdk.convert.api import InboundApi, InvalidRequest
from gymsdk.convert.chat import ENGINE_FIELDS, drop_unknown_fields
from gymsdk.convert.tokens import get_carried_fields
from gymsdk.types import Item

THINKING_BUDGET_EFFORTS = ((16_384, "high"), (4_096, "medium"), (0, "low"))
"""From how many tokens to think on which effort is asked for."""

EFFORT_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts in the words that every engine knows."""

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Claude Code opens its instructions with a line that differs in each request: sent on, it would keep every engine
# from finding the rest of the prompt in its cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def parse_instructions(system: Any) -> str | None:
    """Give the *system* prompt as one text, `None` where it is empty."""
    if system is None:
        return None
    texts = [api.get_text(part, "text", "system") for part in anthropic_content.parse_parts(system, "system")]
    said = [text for each in texts if (text := _BILLING.sub("", each))]
    return "\n\n".join(said) or None


def parse_tools(offered: Any) -> list[Item] | None:
    """Give the tools *offered*, `None` where there are none; a server's own tool is refused: nobody here runs it."""
    return [
        _parse_tool(tool, f"tools.{number}") for number, tool in enumerate(api.check_objects(offered or [], "tools"))
    ] or None


def parse_tool_choice(body: Item) -> Item:
    """Give which tool the model may or must call, and whether several at once."""
    wish = api.get_object(body, "tool_choice")
    if not wish:
        return {}
    alone = {"parallel_tool_calls": False} if wish.get("disable_parallel_tool_use") else {}
    kind = wish.get("type")
    if kind == "tool":
        return alone | {"tool_choice": {"type": "function", "name": api.get_text(wish, "name", "tool_choice")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise api.build_invalid_field("tool_choice.type", "'auto', 'any', 'tool' or 'none'")
    return alone | {"tool_choice": TOOL_CHOICES[kind]}


def parse_reasoning(body: Item) -> Item | None:
    """Give how hard the model shall think, `None` where it is left to it.

    An effort comes before a budget. Thinking that is disabled asks for nothing, for few engines can be asked for none.
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
        raise api.build_invalid_field("thinking.budget_tokens", "a whole number")
    return {"effort": next((effort for least, effort in THINKING_BUDGET_EFFORTS if budget >= least), "low")}


def parse_text_format(body: Item) -> Item | None:
    """Give the form that the answer shall have, `None` where that is any."""
    config = api.get_object(body, "output_config")
    newer, older = api.get_object(config, "format", "output_config"), api.get_object(body, "output_format")
    form, where = newer or older, "output_config.format" if newer else "output_format"
    if not form:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise api.build_invalid_field(where, "an object with type 'json_schema' and a schema")
    return {"format": {"type": "json_schema", "name": "answer", "schema": form["schema"], "strict": True}}


def _parse_tool(tool: Item, where: str) -> Item:
    name = api.get_text(tool, "name", where)
    kind = tool.get("type") or "custom"
    if not isinstance(tool.get("input_schema"), dict):
        if kind != "custom":
            sentence = f"{where}: nobody behind this server runs the tool {kind!r}"
            advice = "offer one of your own, with a name and an input_schema"
            raise InvalidRequest(f"{sentence}; {advice}", param=where)
        raise api.build_invalid_field(f"{where}.input_schema", "an object")
    told = {"type": "function", "name": name, "parameters": tool["input_schema"], "strict": bool(tool.get("strict"))}
    return told | ({"description": tool["description"]} if tool.get("description") is not None else {})


UNCHANGED_FIELDS = frozenset({"model", "temperature", "top_p"})
"""What has one name in both APIs."""

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
        "stop_sequences",
        "stream",
        "system",
        "thinking",
        "tool_choice",
        "tools",
    }
)

STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
"""Why an answer is incomplete."""

STOP_SEQUENCE_FIELD = "stop_sequence"
"""The key of a Response, beside those that Responses has, that holds the stop sequence which ended it."""


def parse_request(body: Item) -> Item:
    """Give the Responses request that a *body* asks for; raises `Malformed`.

    An engine's own keys are passed on as they are, and so is what `metadata` holds beside the user's id. A last
    message of the assistant is part of what was said: whether the model goes on with it is up to the engine.
    """
    if body.get("mcp_servers"):
        raise InvalidRequest(
            "nobody behind this server calls 'mcp_servers'; offer their tools as your own", "mcp_servers"
        )
    given = drop_unknown_fields(body, UNCHANGED_FIELDS | TRANSLATED_FIELDS, where="Messages")
    kept = {key: value for key, value in given.items() if key in UNCHANGED_FIELDS or key in ENGINE_FIELDS}
    told = {
        "instructions": parse_instructions(body.get("system")),
        "max_output_tokens": _limit(body),
        "reasoning": parse_reasoning(body),
        "stop": _stops(body),
        "text": parse_text_format(body),
        "tools": parse_tools(body.get("tools")),
    }
    wished = kept | told | parse_tool_choice(body) | _metadata(body) | {"input": _input(body.get("messages"))}
    return {key: value for key, value in wished.items() if value is not None}


def build_answer(response: Item, body: Item) -> Item:
    """Give the message that *response* to *body* amounts to."""
    return {
        "id": responses.generate_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or body.get("model") or "",
        "content": build_blocks(_shown(response["output"], body)),
        "stop_reason": _reason(response),
        "stop_sequence": response.get(STOP_SEQUENCE_FIELD),
        "stop_details": None,
        "usage": format_usage(response),
    }


def _shown(output: list[Item], body: Item) -> list[Item]:
    """The items that a client is told: without thoughts where it wants none; their tokens go on with the turn's last.

    Anthropic's own servers show none to those who do not ask. But what a client is not told it cannot send back, and
    engines count on it.
    """
    if (body.get("thinking") or {}).get("type") != "disabled":
        return output
    kept = [dict(item) for item in output if item.get("type") != "reasoning"]
    if kept:
        kept[-1] |= get_carried_fields(output)
    return kept


def format_usage(response: Item) -> Item:
    """Give the usage of *response* as Messages counts it: what was read from a cache is not among the input."""
    used = counts.parse_usage(response)
    cached = min(used.cached_tokens or 0, used.input_tokens)
    counted: Item = {
        "input_tokens": used.input_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used.output_tokens,
    }
    if used.reasoning_tokens is not None:
        counted["output_tokens_details"] = {"thinking_tokens": used.reasoning_tokens}
    return counted


def format_token_count(tokens: int) -> Item:
    """Give the answer to `/v1/messages/count_tokens` where the prompt of the body has so many *tokens*."""
    return {"input_tokens": tokens}


def _input(messages: Any) -> list[Item]:
    given = api.check_objects(messages, "messages")
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return [item for number, message in enumerate(given) for item in parse_message(message, f"messages.{number}")]


def _limit(body: Item) -> int | None:
    limit = body.get("max_tokens")
    if limit is None or (isinstance(limit, int) and limit > 0):
        return limit
    raise api.build_invalid_field("max_tokens", "a whole number above zero")


def _stops(body: Item) -> Any:
    """The stop sequences, or where there are none what an engine has a key for."""
    stops = body.get("stop_sequences")
    if not stops:
        return body.get("stop")
    if isinstance(stops, list) and all(isinstance(stop, str) for stop in stops):
        return stops
    raise api.build_invalid_field("stop_sequences", "a list of strings")


def _metadata(body: Item) -> Item:
    given = api.get_object(body, "metadata")
    rest = {key: value for key, value in given.items() if key != "user_id"}
    return {"user": given.get("user_id"), "metadata": rest or None}


def _reason(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in STOP_REASONS:
        return STOP_REASONS[reason]
    if response.get("status") == "incomplete":
        return "max_tokens"
    if any(item.get("type") == "function_call" for item in response["output"]):
        return "tool_use"
    if response.get(STOP_SEQUENCE_FIELD) is not None:
        return "stop_sequence"
    return "refusal" if any(_refuses(item) for item in response["output"]) else "end_turn"


def _refuses(item: Item) -> bool:
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
)
