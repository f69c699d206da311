"""A dialect: how one of the two OpenAI APIs is asked what a Responses request asks, and what its answer says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymsdk import http, wire
from gymsdk.transcript import Item
from gymsdk.wire import Api, Thoughts

from . import chat, responses


@dataclass(frozen=True, slots=True)
class Dialect:
    """The *path* to post at, the *body* of a request, and the *response* that an answer to a request amounts to."""

    path: str
    body: Callable[[Item], Item]
    response: Callable[[Any, Item], Item]

    def read(self, answer: http.Answer, request: Item) -> Item:
        """Give the Response that *answer* to *request* amounts to; a prompt that does not fit makes it incomplete."""
        if wire.overflowed(answer.status, answer.body):
            return wire.overflow(answer.text, model=request["model"], request=request)
        with http.discreet(answer.key):
            return self.response(answer.json(), request)


def dialect(api: Api, *, thoughts: Thoughts = "field", limit: str = "max_tokens") -> Dialect:
    """The dialect of *api*; *thoughts* and *limit* are what chat servers are divided over."""
    if api == "responses":
        return Dialect(responses.PATH, responses.body, responses.response)
    return Dialect(chat.PATH, partial(chat.body, thoughts=thoughts, limit=limit), chat.response)
