"""A vLLM server at a base URL, asked in Chat Completions or in Responses.

It is always told temperature and top_p, 1.0 where the request does not say: vLLM would otherwise take them from the
model's `generation_config.json`, and trainers' servers refuse a request without.
"""

from __future__ import annotations

from gymsdk import http
from gymsdk.convert.dialect import dialect
from gymsdk.settings import ModelOptions, named, reached
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model

SAMPLING = ("temperature", "top_p")


class Vllm:
    """The model *name* of a vLLM server."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.name = name
        self._options = options
        self._dialect = dialect(options.api or "chat", thoughts=options.thoughts or "field")
        self._url = options.url(self._dialect.path)
        self._retry = http.Retry(times=options.retries, first=options.wait)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002 - the protocol's
        """Give the server's answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        asked = request | {"model": self.name} | sampling(request)
        body, options = self._dialect.body(asked), self._options
        answer = await http.post(self._url, body, key=options.api_key, timeout=options.timeout, retry=self._retry)
        return self._dialect.read(answer, asked)

    async def aclose(self) -> None:
        """Nothing to release: connections are shared, and close with the event loop."""


def sampling(request: Item) -> Item:
    """Give temperature and top_p of *request*, 1.0 for what it leaves open."""
    return {key: 1.0 if request.get(key) is None else request[key] for key in SAMPLING}


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = named("vllm", name)
    return Vllm(known, reached(f"vllm/{known}", options))
