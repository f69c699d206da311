"""Hosted models through the openai SDK: Responses by default, Chat Completions where asked."""

from __future__ import annotations

import asyncio
import os
from functools import cache, partial
from typing import TYPE_CHECKING

from pydantic import SecretStr

from gymsdk import http
from gymsdk.convert.dialect import dialect
from gymsdk.errors import BadModelOption
from gymsdk.settings import ModelOptions, Settings, named, options, settings, variables
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

BASE_URL = "https://api.openai.com/v1"


class Hosted:
    """The hosted model *name*."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.name = name
        self._options = options
        self._host = http.host(options.url(""))
        # Hosted models refuse reasoning that is not their own, and the older word for the limit.
        self._dialect = dialect(
            options.api or "responses", thoughts=options.thoughts or "drop", limit="max_completion_tokens"
        )

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002 - the protocol's
        """Give the provider's answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        from openai import APIStatusError

        asked = request | {"model": self.name}
        with http.discreet(self._options.api_key):
            try:
                return self._dialect.response(await self._post(self._dialect.body(asked)), asked)
            except APIStatusError as error:
                return self._dialect.read(self._refused(error), asked)

    async def aclose(self) -> None:
        """Nothing to release: clients are shared, and close with the event loop."""

    def _refused(self, error: APIStatusError) -> http.Answer:
        retry_after = http.seconds(error.response.headers.get("Retry-After"))
        return http.Answer(self._host, error.status_code, error.response.content, retry_after, self._options.api_key)

    async def _post(self, body: Item) -> object:
        """Give the parsed answer as it was sent: the SDK's own models would drop and add fields."""
        from openai import APIConnectionError, APITimeoutError

        client = await _clients(self._options).get()
        try:
            async with asyncio.timeout(self._options.timeout):
                return await client.post(f"/{self._dialect.path}", body=body, cast_to=object)
        except (TimeoutError, APITimeoutError) as error:
            raise http.late(self._host, self._options.timeout) from error
        except APIConnectionError as error:
            raise http.unreachable(self._host, error.__cause__ or error) from error


def build(name: str, given: ModelOptions) -> Model:
    """Give the hosted model *name*; the key is that of the options, of OPENAI_API_KEY, or of the settings."""
    known = named("openai", name)
    try:
        import openai  # noqa: F401 - it takes a second: now, rather than in the first episode
    except ModuleNotFoundError as error:
        raise BadModelOption(f"openai/{known} needs the openai SDK: pip install 'gymsdk[openai]'") from error
    return Hosted(known, options(f"openai/{known}", given.model_dump() | _account(known, given)))


def _account(name: str, given: ModelOptions) -> Item:
    variable = os.environ.get("OPENAI_BASE_URL")
    apart = given.apart and given.base_url != (variable or BASE_URL)
    key = given.api_key or (None if apart else os.environ.get("OPENAI_API_KEY"))
    base_url = given.base_url or variable
    if key:
        return {"api_key": key, "base_url": base_url or BASE_URL}
    if apart:
        raise BadModelOption(
            f"openai/{name} has no key for {given.base_url}: set OPENAI_BASE_URL to it and OPENAI_API_KEY to its key, "
            f"or write endpoint/{name}@{given.base_url} for a server that needs none"
        )
    # A key and a base URL belong together: the folder's key never goes to another's server, nor another's key there.
    found = Settings() if given.apart else variables() if base_url else settings()
    if found.policy_api_key:
        return {"api_key": found.policy_api_key, "base_url": base_url or found.policy_base_url or BASE_URL}
    raise BadModelOption(f"openai/{name} needs a key: set OPENAI_API_KEY, or policy_api_key in env.yaml")


@cache
def _clients(options: ModelOptions) -> http.PerLoop[AsyncOpenAI]:
    # Kept while its loop runs: the SDK closes a forgotten client late, by file numbers that new connections may have.
    return http.PerLoop(partial(_client, options))


def _client(options: ModelOptions) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    key = options.api_key or SecretStr("")
    return AsyncOpenAI(
        api_key=key.get_secret_value(),
        base_url=options.base_url,
        timeout=options.timeout,
        max_retries=options.retries,
    )
