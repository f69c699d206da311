"""A dialect: how one of the two OpenAI APIs is asked what a Responses request asks, and what its answer says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gymsdk.transcript import Item
from gymsdk.wire import Api, Thoughts

from . import chat, responses
from .own import Own


class Read(Protocol):
    """Gives the Response that an answer to a request amounts to, its tokens held to their form where it is *strict*."""

    def __call__(self, answer: Any, request: Item, /, *, strict: bool) -> Item: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """The *path* to post at, the *body* of a request, and the *response* that an answer to a request amounts to.

    What is *translated* has another name in the body, or another form.
    """

    path: str
    build_body: Callable[[Item], Item]
    parse_answer: Read
    translated_fields: frozenset[str]


def dialect(api: Api, *, thoughts: Thoughts = "field", limit: str = "max_tokens") -> Dialect:
    """The dialect of *api*; *thoughts* and *limit* are what servers are divided over."""
    if api == "responses" and thoughts == "drop":
        own = Own()
        return Dialect(responses.PATH, own.build_body, own.parse_answer, frozenset())
    if api == "responses":
        return Dialect(responses.PATH, responses.body, responses.response, frozenset())
    body = partial(chat.body, thoughts=thoughts, limit=limit)
    return Dialect(chat.PATH, body, chat.response, frozenset(chat.TRANSLATED))
