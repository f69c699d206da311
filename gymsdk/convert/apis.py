"""The faces there are, by their paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gymsdk.convert import anthropic, chat, chat_inbound, responses
from gymsdk.convert.api import InboundApi
from gymsdk.responses import Api, ReasoningFormat
from gymsdk.types import Item

INBOUND_APIS: dict[str, InboundApi] = {
    face.path: face for face in (responses.RESPONSES_API, chat_inbound.CHAT_API, anthropic.MESSAGES_API)
}


class ParseAnswer(Protocol):
    """Gives the Response that an answer to a request amounts to, its tokens held to their form where it is *strict*."""

    def __call__(self, answer: Any, request: Item, /, *, strict: bool) -> Item: ...


@dataclass(frozen=True, slots=True)
class OutboundApi:
    """The *path* to post at, the *body* of a request, and the *response* that an answer to a request amounts to.

    What is *translated* has another name in the body, or another form.
    """

    path: str
    build_body: Callable[[Item], Item]
    parse_answer: ParseAnswer
    translated_fields: frozenset[str]


def get_outbound_api(api: Api, *, thoughts: ReasoningFormat = "field", limit: str = "max_tokens") -> OutboundApi:
    """The dialect of *api*; *thoughts* and *limit* are what servers are divided over."""
    if api == "responses" and thoughts == "drop":
        own = responses.ReasoningFilter()
        return OutboundApi(responses.RESPONSES_PATH, own.build_body, own.parse_answer, frozenset())
    if api == "responses":
        return OutboundApi(responses.RESPONSES_PATH, responses.build_body, responses.parse_answer, frozenset())
    body = partial(chat.build_body, thoughts=thoughts, limit=limit)
    return OutboundApi(chat.CHAT_PATH, body, chat.parse_completion, frozenset(chat.TRANSLATED_FIELDS))
