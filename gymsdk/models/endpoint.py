"""Any OpenAI-compatible server at a base URL, asked in Chat Completions or in Responses."""

from __future__ import annotations

from gymsdk import http
from gymsdk.convert.dialect import dialect
from gymsdk.settings import ModelOptions, named, reached
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model


class Endpoint:
    """The model *name* of a server."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.name = name
        self._options = options
        self._dialect = dialect(options.api or "chat", thoughts=options.thoughts or "field")
        self._url = options.url(self._dialect.path)
        self._retry = http.Retry(times=options.retries, first=options.wait)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002 - the protocol's
        """Give the server's answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        asked = request | {"model": self.name}
        body, options = self._dialect.body(asked), self._options
        answer = await http.post(self._url, body, key=options.api_key, timeout=options.timeout, retry=self._retry)
        return self._dialect.read(answer, asked)

    async def aclose(self) -> None:
        """Nothing to release: connections are shared, and close with the event loop."""


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = named("endpoint", name)
    return Endpoint(known, reached(f"endpoint/{known}", options))
