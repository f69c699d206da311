"""List the inbound APIs by path, and select the outbound API of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from gymsdk.convert import anthropic, chat, chat_inbound, completions, responses
from gymsdk.convert.api import InboundApi
from gymsdk.convert.request_keys import TRANSLATED_KEYS
from gymsdk.responses import Api, ReasoningFormat
from gymsdk.types import Item

INBOUND_APIS: dict[str, InboundApi] = {
    api.path: api for api in (responses.RESPONSES_API, chat_inbound.CHAT_API, anthropic.MESSAGES_API)
}


@dataclass(frozen=True, slots=True)
class CountingApi:
    """An API that counts the tokens of a prompt.

    Attributes:
        inbound: Its requests and errors.
        method: The method of a model that counts the tokens of its requests.
        format_count: Returns the answer for a number of tokens.
    """

    inbound: InboundApi
    method: Literal["count", "count_input"]
    format_count: Callable[[int], Item]


COUNTING_APIS = (
    CountingApi(responses.INPUT_TOKENS_API, "count_input", responses.format_input_tokens),
    CountingApi(anthropic.COUNT_TOKENS_API, "count", anthropic.format_token_count),
)


class ParseAnswer(Protocol):
    """Converts a server's answer to a request into a Response; *strict* rejects invalid token fields."""

    def __call__(self, answer: Any, request: Item, /, *, strict: bool) -> Item: ...


@dataclass(frozen=True, slots=True)
class OutboundApi:
    """An OpenAI API in which to send requests to a model's server.

    Attributes:
        path: The path below the base URL.
        build_body: Returns the body for a Responses request.
        parse_answer: Returns the Response for an answer.
        translated_fields: The fields of a Responses request that the body has under another name or in another form.
        is_forwarded: Whether the server gets the request without the additions for conversations: the variables of the
            chat template, and the fields for token ids.
    """

    path: str
    build_body: Callable[[Item], Item]
    parse_answer: ParseAnswer
    translated_fields: frozenset[str]
    is_forwarded: bool = False


COMPLETIONS = OutboundApi(
    completions.COMPLETIONS_PATH, completions.build_body, completions.parse_answer, TRANSLATED_KEYS, is_forwarded=True
)


def get_outbound_api(
    api: Api, *, thoughts: ReasoningFormat = "field", limit: str = "max_tokens", passes_unknown: bool = False
) -> OutboundApi:
    """Return the outbound API named *api*.

    Args:
        api: `chat` or `responses`.
        thoughts: How to send earlier reasoning back: in a `field` of the message, in `<think>` `tags`, or `drop` it.
        limit: The name of the output limit in Chat Completions, which differs between servers.
        passes_unknown: Whether to send keys that gymsdk does not know.
    """
    if api == "responses" and thoughts == "drop":
        reasoning_filter = responses.ReasoningFilter(passes_unknown=passes_unknown)
        return OutboundApi(
            responses.RESPONSES_PATH, reasoning_filter.build_body, reasoning_filter.parse_answer, frozenset()
        )
    if api == "responses":
        build_body = partial(responses.build_body, passes_unknown=passes_unknown)
        return OutboundApi(responses.RESPONSES_PATH, build_body, responses.parse_answer, frozenset())
    build_chat_body = partial(chat.build_body, thoughts=thoughts, limit=limit, passes_unknown=passes_unknown)
    return OutboundApi(chat.CHAT_PATH, build_chat_body, chat.parse_completion, TRANSLATED_KEYS)
