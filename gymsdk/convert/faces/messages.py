"""Messages of Anthropic as a server speaks it: its body becomes a Responses request, a Response a message."""

from __future__ import annotations

from typing import Any

from gymsdk import usage as counts
from gymsdk import wire
from gymsdk.convert.keys import ENGINE, known
from gymsdk.convert.tokens import carried
from gymsdk.transcript import Item

from . import shape, wishes
from .anthropic_errors import error
from .blocks import blocks, items
from .deltas import BEAT, broken, events
from .face import Face, Malformed

SAME = frozenset({"model", "temperature", "top_p"})
"""What has one name in both APIs."""

OTHER = frozenset(
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

REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}
"""Why an answer is incomplete."""

STOP = "stop_sequence"
"""The key of a Response, beside those that Responses has, that holds the stop sequence which ended it."""


def request(body: Item) -> Item:
    """Give the Responses request that a *body* asks for; raises `Malformed`.

    An engine's own keys are passed on as they are, and so is what `metadata` holds beside the user's id. A last
    message of the assistant is part of what was said: whether the model goes on with it is up to the engine.
    """
    if body.get("mcp_servers"):
        raise Malformed("nobody behind this server calls 'mcp_servers'; offer their tools as your own", "mcp_servers")
    given = known(body, SAME | OTHER, where="Messages")
    kept = {key: value for key, value in given.items() if key in SAME or key in ENGINE}
    told = {
        "instructions": wishes.instructions(body.get("system")),
        "max_output_tokens": _limit(body),
        "reasoning": wishes.reasoning(body),
        "stop": _stops(body),
        "text": wishes.text(body),
        "tools": wishes.tools(body.get("tools")),
    }
    wished = kept | told | wishes.choice(body) | _metadata(body) | {"input": _input(body.get("messages"))}
    return {key: value for key, value in wished.items() if value is not None}


def answer(response: Item, body: Item) -> Item:
    """Give the message that *response* to *body* amounts to."""
    return {
        "id": wire.fresh("msg"),
        "type": "message",
        "role": "assistant",
        "model": response.get("model") or body.get("model") or "",
        "content": blocks(_shown(response["output"], body)),
        "stop_reason": _reason(response),
        "stop_sequence": response.get(STOP),
        "stop_details": None,
        "usage": usage(response),
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
        kept[-1] |= carried(output)
    return kept


def usage(response: Item) -> Item:
    """Give the usage of *response* as Messages counts it: what was read from a cache is not among the input."""
    used = counts.of(response)
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


def count(tokens: int) -> Item:
    """Give the answer to `/v1/messages/count_tokens` where the prompt of the body has so many *tokens*."""
    return {"input_tokens": tokens}


def _input(messages: Any) -> list[Item]:
    given = shape.objects(messages, "messages")
    if not given:
        raise Malformed("messages must hold at least one message", "messages")
    return [item for number, message in enumerate(given) for item in items(message, f"messages.{number}")]


def _limit(body: Item) -> int | None:
    limit = body.get("max_tokens")
    if limit is None or (isinstance(limit, int) and limit > 0):
        return limit
    raise shape.wrong("max_tokens", "a whole number above zero")


def _stops(body: Item) -> Any:
    """The stop sequences, or where there are none what an engine has a key for."""
    stops = body.get("stop_sequences")
    if not stops:
        return body.get("stop")
    if isinstance(stops, list) and all(isinstance(stop, str) for stop in stops):
        return stops
    raise shape.wrong("stop_sequences", "a list of strings")


def _metadata(body: Item) -> Item:
    given = shape.object_(body, "metadata")
    rest = {key: value for key, value in given.items() if key != "user_id"}
    return {"user": given.get("user_id"), "metadata": rest or None}


def _reason(response: Item) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    if reason in REASONS:
        return REASONS[reason]
    if response.get("status") == "incomplete":
        return "max_tokens"
    if any(item.get("type") == "function_call" for item in response["output"]):
        return "tool_use"
    if response.get(STOP) is not None:
        return "stop_sequence"
    return "refusal" if any(_refuses(item) for item in response["output"]) else "end_turn"


def _refuses(item: Item) -> bool:
    content = item.get("content")
    return isinstance(content, list) and any(part.get("type") == "refusal" for part in content)


FACE = Face(path="messages", parse_request=request, build_answer=answer, stream_events=events, build_error=error, build_error_frames=broken, heartbeat=BEAT)
