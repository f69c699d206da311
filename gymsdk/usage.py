"""The token usage of model calls: read it from responses, add it up by role, and write it in the form of a Response."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, TypeAlias

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from gymsdk.types import Item


class Usage(BaseModel):
    """Tokens used by one or more model calls; a detail is `None` if a call did not report it."""

    model_config = ConfigDict(frozen=True)

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    calls: int = 0


NO_USAGE = Usage()
"""The usage of no call."""

UsageByRole: TypeAlias = dict[str, Usage]
"""Usage by role: `policy`, or the name of a config field that holds another model."""

_collected_usage: ContextVar[UsageByRole | None] = ContextVar("gymsdk_usage", default=None)


def parse_usage(response: Item) -> Usage:
    """Return the usage that *response* reports, or zeros if it reports none."""
    input_tokens, output_tokens, total_tokens, cached_tokens, reasoning_tokens = _read_usage(response.get("usage"))
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=total_tokens,
        cached_tokens=cached_tokens,
        reasoning_tokens=reasoning_tokens,
        calls=1,
    )


def build_usage(
    input_tokens: int = 0,
    output_tokens: int = 0,
    *,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
    total_tokens: int = 0,
) -> Item:
    """Return the `usage` of a Response; a detail is null if the provider did not report it.

    Args:
        input_tokens: The number of tokens of the prompt.
        output_tokens: The number of generated tokens.
        cached_tokens: How many tokens of the prompt the engine had cached.
        reasoning_tokens: How many of the generated tokens are reasoning.
        total_tokens: The sum as the provider reports it; by default that of the prompt and the generated tokens.
    """
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": total_tokens or input_tokens + output_tokens,
    }


def normalize_usage(usage: object) -> Item:
    """Return the `usage` of a Response with the fields of `Usage`; each is an integer, and details may be null.

    An episode must not fail because a server reports something else.
    """
    input_tokens, output_tokens, total_tokens, cached_tokens, reasoning_tokens = _read_usage(usage)
    return build_usage(
        input_tokens,
        output_tokens,
        cached_tokens=cached_tokens,
        reasoning_tokens=reasoning_tokens,
        total_tokens=total_tokens,
    )


def _read_usage(usage: object) -> tuple[int, int, int, int | None, int | None]:
    """Return the input, output, total, cached and reasoning tokens of the `usage` of a Response."""
    if not isinstance(usage, dict):
        return 0, 0, 0, None, None
    prompt, generated, total = usage.get("input_tokens"), usage.get("output_tokens"), usage.get("total_tokens")
    input_tokens = prompt if isinstance(prompt, int) else 0
    output_tokens = generated if isinstance(generated, int) else 0
    total_tokens = total if isinstance(total, int) and total else input_tokens + output_tokens
    cached_tokens = _read_detail(usage.get("input_tokens_details"), "cached_tokens")
    return (
        input_tokens,
        output_tokens,
        total_tokens,
        cached_tokens,
        _read_detail(usage.get("output_tokens_details"), "reasoning_tokens"),
    )


def _read_detail(details: object, key: str) -> int | None:
    count = details.get(key) if isinstance(details, dict) else None
    return count if isinstance(count, int) else None


def add_usage(first: Usage, second: Usage) -> Usage:
    """Return the sum; a detail is `None` if either operand lacks it."""
    if not first.calls or not second.calls:
        return second if not first.calls else first
    return Usage(
        input_tokens=first.input_tokens + second.input_tokens,
        output_tokens=first.output_tokens + second.output_tokens,
        total_tokens=first.total_tokens + second.total_tokens,
        cached_tokens=_add_optional(first.cached_tokens, second.cached_tokens),
        reasoning_tokens=_add_optional(first.reasoning_tokens, second.reasoning_tokens),
        calls=first.calls + second.calls,
    )


def merge_usage(first: UsageByRole, second: UsageByRole) -> UsageByRole:
    """Return the sum for every role."""
    return first | {role: add_usage(first.get(role, NO_USAGE), usage) for role, usage in second.items()}


def _add_optional(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def usage_to_item(usage: Usage) -> Item:
    """Return *usage* in the form of a Response object's `usage`."""
    return build_usage(
        usage.input_tokens,
        usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        total_tokens=usage.total_tokens,
    )


class collect_usage:  # noqa: N801 - a context manager, used like a function
    """Add the usage that `record_usage` reports inside the block to *usage_by_role*."""

    __slots__ = ("_token", "_usage_by_role")

    def __init__(self, usage_by_role: UsageByRole) -> None:
        self._usage_by_role = usage_by_role
        self._token: Token[UsageByRole | None] | None = None

    def __enter__(self) -> None:
        if _collected_usage.get() is not self._usage_by_role:
            self._token = _collected_usage.set(self._usage_by_role)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _collected_usage.reset(self._token)


def record_usage(role: str, response: Item) -> None:
    """Add the usage of *response* to *role* in the enclosing `collect_usage` block, if there is one."""
    collected = _collected_usage.get()
    if collected is not None:
        collected[role] = add_usage(collected.get(role, NO_USAGE), parse_usage(response))


def fill_usage_details(response: Item) -> Item:
    """Return *response* with 0 for unknown usage details: OpenAI's client types do not allow null there."""
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return response
    details = {key: _replace_nulls(value) if key.endswith("_details") else value for key, value in usage.items()}
    return response | {"usage": details}


def _replace_nulls(details: object) -> object:
    if not isinstance(details, dict):
        return details
    return {key: 0 if value is None else value for key, value in details.items()}
