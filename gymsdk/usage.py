"""The tokens model calls used: read off a response, summed, and noted by role for the episode in hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pydantic import BaseModel, ConfigDict

from gymsdk.transcript import Item


class Usage(BaseModel):
    """Tokens of one or more model calls; a detail is `None` where a call did not report it."""

    model_config = ConfigDict(frozen=True)

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    calls: int = 0


Ledger = dict[str, Usage]
"""Usage by role: `policy`, and the names of the config fields that hold other models."""

_ledger: ContextVar[Ledger | None] = ContextVar("gymsdk_usage", default=None)


def of(response: Item) -> Usage:
    """Give the usage *response* reports, zero where it reports none."""
    usage = response.get("usage")
    given, taken = _count(usage, "input_tokens") or 0, _count(usage, "output_tokens") or 0
    return Usage(
        input_tokens=given,
        output_tokens=taken,
        total_tokens=_count(usage, "total_tokens") or given + taken,
        cached_tokens=_count(usage, "input_tokens_details", "cached_tokens"),
        reasoning_tokens=_count(usage, "output_tokens_details", "reasoning_tokens"),
        calls=1,
    )


def _count(value: object, *path: str) -> int | None:
    """Give the whole number at *path*; a server may report anything, and no episode fails for it."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) else None


def add(one: Usage, other: Usage) -> Usage:
    """Give the sum; a detail that a call did not report is not known of the sum either."""
    if not one.calls or not other.calls:
        return other if not one.calls else one
    return Usage(
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        total_tokens=one.total_tokens + other.total_tokens,
        cached_tokens=_both(one.cached_tokens, other.cached_tokens),
        reasoning_tokens=_both(one.reasoning_tokens, other.reasoning_tokens),
        calls=one.calls + other.calls,
    )


def together(one: Ledger, other: Ledger) -> Ledger:
    """Give the sum by role."""
    return one | {role: add(one.get(role, Usage()), used) for role, used in other.items()}


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def body(usage: Usage) -> Item:
    """Give *usage* as a Response object carries it."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


@contextmanager
def counted(ledger: Ledger) -> Iterator[None]:
    """Collect what is noted inside the block in *ledger*."""
    token = _ledger.set(ledger)
    try:
        yield
    finally:
        _ledger.reset(token)


def note(role: str, response: Item) -> None:
    """Add *response*'s usage to *role* in the block around the call, if there is one."""
    ledger = _ledger.get()
    if ledger is not None:
        ledger[role] = add(ledger.get(role, Usage()), of(response))


def whole(response: Item) -> Item:
    """Give *response* with 0 where a detail of its usage is not known: OpenAI's types have no null there."""
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return response
    details = {key: _without_nulls(value) if key.endswith("_details") else value for key, value in usage.items()}
    return response | {"usage": details}


def _without_nulls(details: object) -> object:
    if not isinstance(details, dict):
        return details
    return {key: 0 if value is None else value for key, value in details.items()}
