"""A model's response: asked for and checked, so that whatever a model does wrong is one `Failed`."""

from __future__ import annotations

import asyncio
import inspect

from gymsdk import wire
from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model


async def asked(model: Model, request: Item, *, episode: Episode | None, who: str = "the model") -> Item:
    """Give *model*'s response to *request*; raises `Failed` where it gives none, or one that cannot be read."""
    response = await told(model, request, episode=episode, who=who)
    if (response.get("incomplete_details") or {}).get("reason") == "content_filter":
        # What was held back is neither an answer nor a budget that ran out: there is nothing to grade.
        raise Failed(f"{who}'s answer was held back by a content filter", kind="model_withheld")
    return response


async def told(model: Model, request: Item, *, episode: Episode | None, who: str = "the model") -> Item:
    """Give *model*'s response to *request* like `asked`, also one that a content filter held back."""
    try:
        response = await model.respond(request, episode=episode)
    except EpisodeError:
        raise
    except asyncio.CancelledError as error:
        if asked_to_stop():
            raise
        # Nobody cancelled this: let through, it would pass for the end of the whole run.
        raise Failed(f"{who} raised CancelledError", kind="model_raised", retryable=True) from error
    except Exception as error:
        kind = "model_timeout" if isinstance(error, TimeoutError) else "model_raised"
        raise Failed(f"{who} raised {type(error).__name__}: {error}", kind=kind, retryable=True) from error
    if not is_response(response):
        raise Failed(f"{who}'s answer is no Response object", kind="model_bad_answer", retryable=True)
    if response.get("error") or not wire.is_ended(response):
        why = response.get("error") or f"its answer is {response.get('status')!r}"
        raise Failed(f"{who} failed: {why}", kind="model_error", retryable=True)
    return response


def check(model: object) -> None:
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


def asked_to_stop() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_incomplete(response: Item) -> bool:
    """Whether the model ran out of tokens before it had finished."""
    return response.get("status") == "incomplete" or bool(response.get("incomplete_details"))


def is_response(value: object) -> bool:
    """Whether *value* is a Response object as far as anything here reads one."""
    if not isinstance(value, dict) or not isinstance(value.get("output"), list):
        return False
    return all(isinstance(item, dict) and _is_readable(item) for item in value["output"])


def _is_readable(item: Item) -> bool:
    content = item.get("content")
    if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
        return False
    return isinstance(content, (str, list, type(None))) and isinstance(item.get("type", "message"), str)
