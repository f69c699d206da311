"""Hosted models through the openai SDK: Responses by default, Chat Completions where asked."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from gymsdk import context
from gymsdk.convert.apis import get_outbound_api
from gymsdk.credentials import redact_failures
from gymsdk.errors import BadModelOption, Failed
from gymsdk.http import client as http
from gymsdk.http import decompression
from gymsdk.http.client import LoopLocal
from gymsdk.models.endpoint import Upstream
from gymsdk.models.options import (
    ModelOptions,
    PolicySettings,
    load_policy_settings,
    read_policy_variables,
    resolve_model_name,
    validate_options,
)
from gymsdk.router import IsFinalAnswer
from gymsdk.types import Episode, Item, Model

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai._types import RequestOptions

READ_FAILURE_KEY = "gymsdk.unread"
"""The extension of an httpx answer that has the failure to read it."""

REJECTED_STATUS = 413

DEFAULT_BASE_URL = "https://api.openai.com/v1"


class HostedModel:
    """The hosted model *name*."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.name = name
        self._options = options
        self._host = http.get_host(_address(options))
        # Hosted models refuse reasoning that is not their own, and the older word for the limit.
        spoken = get_outbound_api(
            options.api or "responses", thoughts=options.thoughts or "drop", limit="max_completion_tokens"
        )
        self._upstream = Upstream(name, options, spoken, post=self._post)

    def __repr__(self) -> str:
        return f"openai/{self._upstream!r}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Give the provider's answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        return await self._upstream.respond(request, episode=episode)

    async def aclose(self) -> None:
        """Nothing to release: clients are shared, and close with the event loop."""

    async def _post(
        self, path: str, body: Item, *, sticky: str, deadline: float, final: IsFinalAnswer
    ) -> http.HttpResponse:
        """Give the answer as it was sent: the SDK's own models would drop and add fields."""
        from openai import APIConnectionError, APIStatusError, APITimeoutError, HttpxBinaryResponseContent

        client, secrets = await _clients(self._options).get(), _secrets(self._options)
        with redact_failures(*secrets):
            try:
                async with asyncio.timeout_at(deadline):
                    whose: RequestOptions = {"headers": dict(context.build_context_headers())}
                    kind = HttpxBinaryResponseContent
                    answer = await client.post(f"/{path}", body=body, cast_to=kind, options=whose)
                    return self._answer(answer.response.status_code, answer.content, answer.response.headers)
            except APIStatusError as error:
                if (failure := error.response.extensions.get(READ_FAILURE_KEY)) is not None:
                    raise failure from None
                return self._answer(error.status_code, error.response.content, error.response.headers)
            except (TimeoutError, APITimeoutError) as error:
                raise http.build_timeout_error(self._host, self._options.timeout) from error
            except APIConnectionError as error:
                unsent = type(error.__cause__).__name__.startswith("Connect")
                raise (http.build_unreachable_error if unsent else http.build_interrupted_error)(
                    self._host, error
                ) from error

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> http.HttpResponse:
        retry_after = http.parse_retry_after(headers.get("Retry-After"))
        return http.HttpResponse(self._host, status, body, retry_after, _secrets(self._options))


def build(name: str, given: ModelOptions) -> Model:
    """Give the hosted model *name*; the key is that of the options, of OPENAI_API_KEY, or of the settings."""
    known = resolve_model_name("openai", name)
    if given.tokens:
        raise BadModelOption(f"openai/{known} gives nobody its token ids; leave out tokens (--token-ids)")
    if len(given.base_url or ()) > 1:
        raise BadModelOption(
            f"openai/{known} is asked at one address; write vllm/{known} or endpoint/{known} for several"
        )
    try:
        import openai  # noqa: F401 - it takes a second: now, rather than in the first episode
    except ModuleNotFoundError as error:
        raise BadModelOption(f"openai/{known} needs the openai SDK: pip install 'gymsdk[openai]'") from error
    return HostedModel(known, validate_options(f"openai/{known}", given.model_dump() | _account(known, given)))


def _account(name: str, given: ModelOptions) -> Item:
    variable = os.environ.get("OPENAI_BASE_URL")
    own = _address(given)
    apart = given.apart and own != (variable or DEFAULT_BASE_URL)
    key = given.api_key or (None if apart else os.environ.get("OPENAI_API_KEY"))
    base_url = own or variable
    if key:
        return {"api_key": key, "base_url": base_url or DEFAULT_BASE_URL}
    if apart:
        raise BadModelOption(
            f"openai/{name} has no key for {own}: set OPENAI_BASE_URL to it and OPENAI_API_KEY to its key, "
            f"or write endpoint/{name}@{own} for a server that needs none"
        )
    # A key and a base URL belong together: the folder's key never goes to another's server, nor another's key there.
    found = PolicySettings() if given.apart else read_policy_variables() if base_url else load_policy_settings()
    if found.policy_api_key:
        return {"api_key": found.policy_api_key, "base_url": base_url or found.policy_base_url or DEFAULT_BASE_URL}
    raise BadModelOption(f"openai/{name} needs a key: set OPENAI_API_KEY, or policy_api_key in env.yaml")


def _address(options: ModelOptions) -> str:
    return next(iter(options.base_url or ()), "")


def _secrets(options: ModelOptions) -> tuple[SecretStr, ...]:
    return tuple(filter(None, (options.api_key, *options.headers.values())))


@cache
def _clients(options: ModelOptions) -> LoopLocal[AsyncOpenAI]:
    # Kept while its loop runs: the SDK closes a forgotten client late, by file numbers that new connections may have.
    return LoopLocal(partial(_client, options))


def _client(options: ModelOptions) -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    key = options.api_key or SecretStr("")
    return AsyncOpenAI(
        api_key=key.get_secret_value(),
        base_url=_address(options),
        default_headers={name: value.get_secret_value() for name, value in options.headers.items()},
        timeout=options.timeout,
        max_retries=options.retries,
        http_client=DefaultAsyncHttpxClient(
            headers={"accept-encoding": decompression.ACCEPT_ENCODING},
            event_hooks={"response": [partial(_bounded, options)]},
        ),
    )


async def _bounded(options: ModelOptions, answer: Any) -> None:
    """Read the body of *answer* before httpx does, which would decompress and keep whatever comes.

    An exception here would pass for a broken connection, and be retried by the SDK: a body that is refused becomes an
    answer that it does not retry, with the failure in its extensions.
    """
    body, stream = b"", answer.stream
    try:
        assert isinstance(stream, AsyncIterable), "the client is asynchronous"
        host = http.get_host(_address(options))
        body = await http.read_body(stream, host, answer.status_code, answer.headers, options.max_answer)
    except Failed as failure:
        answer.extensions[READ_FAILURE_KEY] = failure
        answer.status_code = REJECTED_STATUS
        answer.headers["x-should-retry"] = "false"
    finally:
        await answer.aclose()
    answer.headers.pop("content-encoding", None)
    answer.is_closed = False
    # The SDK's releases speak through httpx or httpx2, whose streams are not each other's.
    library = sys.modules[type(answer).__module__.partition(".")[0]]
    answer.stream = library.ByteStream(body)
