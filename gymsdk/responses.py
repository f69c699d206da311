"""A model's response: asked for and checked, so that whatever a model does wrong is one `Failed`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TypeGuard

from gymsdk import wire
from gymsdk.errors import EpisodeError, Failed, UsageError
from gymsdk.transcript import Item, is_content
from gymsdk.types import Episode, Model

EXCERPT = 200
"""Characters of an unreadable item that a message shows."""


async def asked(model: Model, request: Item, *, episode: Episode | None, label: str = "the model") -> Item:
    """Give *model*'s response to *request*; raises `Failed` where it gives none, or one that cannot be read."""
    response = await told(model, request, episode=episode, label=label)
    if (response.get("incomplete_details") or {}).get("reason") == "content_filter":
        # What was held back is neither an answer nor a budget that ran out: there is nothing to grade.
        raise Failed(f"{label}'s answer was held back by a content filter", kind="model_withheld")
    return response


async def told(model: Model, request: Item, *, episode: Episode | None, label: str = "the model") -> Item:
    """Give *model*'s response to *request* like `asked`, also one that a content filter held back."""
    try:
        response = await model.respond(request, episode=episode)
    except EpisodeError:
        raise
    except asyncio.CancelledError as error:
        if asked_to_stop():
            raise
        # Nobody cancelled this: let through, it would pass for the end of the whole run.
        raise Failed(f"{label} raised CancelledError", kind="model_raised", retryable=True) from error
    except Exception as error:
        kind = "model_timeout" if isinstance(error, TimeoutError) else "model_raised"
        raise Failed(f"{label} raised {type(error).__name__}: {error}", kind=kind, retryable=True) from error
    if not is_response(response):
        raise _unreadable(response, label)
    if response.get("error") or not wire.is_ended(response):
        why = response.get("error") or f"its answer is {response.get('status')!r}"
        raise Failed(f"{label} failed: {why}", kind="model_error", retryable=True)
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
    """Return whether *value* is a Response object as far as gymsdk reads one."""
    return _has_output(value) and all(map(_is_readable, value["output"]))


def _has_output(value: object) -> TypeGuard[Item]:
    return isinstance(value, dict) and isinstance(value.get("output"), list)


def _is_readable(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    return is_content(item.get("content")) and isinstance(item.get("type", "message"), str)


def _unreadable(value: object, who: str) -> Failed:
    """Return the failure of an answer that is no Response object.

    An answer without a list of items may come from a proxy and change with the next try. One whose items have the wrong
    types is what the model's server makes of its model, and stays so.
    """
    message = f"{who}'s answer is no Response object"
    if not _has_output(value):
        return Failed(message, kind="model_bad_answer", retryable=True)
    number, item = next((number, item) for number, item in enumerate(value["output"]) if not _is_readable(item))
    wrong = repr(item)[:EXCERPT]
    expected = "an item is an object whose `content` is text or a list of parts"
    return Failed(f"{message}: item {number} of its output is {wrong}, and {expected}", kind="model_bad_answer")
